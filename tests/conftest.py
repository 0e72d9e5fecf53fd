"""For all tests: one thread for tensor operations, here and in every process that a test starts.

Small machines run many processes at once in these tests; several threads that spin for each other cost far
more than they gain. Set before anything imports torch.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
