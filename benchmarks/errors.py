"""Why a benchmark gives no numbers.

BenchmarkError
    GateRed          the correctness tests of what is measured do not pass
    DirtyTree        the code that is measured is not committed
    MeasurementFailed  something under measurement did not start, or did not do the same work
    UnreadableResults  a file of results is not as `benchmarks/results.py` writes it
"""


class BenchmarkError(Exception):
    """The root: said to the user, without a traceback."""


class GateRed(BenchmarkError):
    pass


class DirtyTree(BenchmarkError):
    pass


class MeasurementFailed(BenchmarkError):
    pass


class UnreadableResults(BenchmarkError):
    pass
