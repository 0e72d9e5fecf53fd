"""Bad bytes for every port of a deployment, and strangers at every door of a closed one: what
tests/cluster/test_fuzz.py runs for seconds, and benchmarks/fuzz.py for as long as it is given.

`cases` is the unit, a method and the messages of one call, and keeps cases in files; `structure` makes
messages that parse (hypothesis), `mutate` breaks bytes, `send` sends a case and judges how the call ends.
`strangers` sends cases to a closed deployment with what `credentials` has to show, which opens nothing.
`run` sends many at a time and looks at what became of the deployment. `talk` and `h2` are how all of them
speak.
"""

from fuzzing.cases import Case, load, save
from fuzzing.credentials import Keys
from fuzzing.run import Report, Run
from fuzzing.strangers import strangers
from fuzzing.structure import structured

__all__ = ["Case", "Keys", "Report", "Run", "load", "save", "strangers", "structured"]
