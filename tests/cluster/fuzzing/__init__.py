"""Bad bytes for every port of a deployment: what tests/cluster/test_fuzz.py runs for seconds, and
benchmarks/fuzz.py for as long as it is given.

`cases` is the unit, a method and the messages of one call, and keeps cases in files; `structure` makes
messages that parse (hypothesis), `mutate` breaks bytes, `send` sends a case and judges how the call ends,
`run` sends many at a time and looks at what became of the deployment.
"""

from fuzzing.cases import Case, load, save
from fuzzing.run import Report, Run
from fuzzing.structure import structured

__all__ = ["Case", "Report", "Run", "load", "save", "structured"]
