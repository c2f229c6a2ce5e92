"""Quality and fidelity in one pass, so that nothing is compiled twice: `python -m benchmarks.plans`."""

from benchmarks.cases import report
from benchmarks.fidelity import FIDELITY
from benchmarks.quality import QUALITY

if __name__ == "__main__":
    report(QUALITY, FIDELITY)
