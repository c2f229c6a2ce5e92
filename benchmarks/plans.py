"""Quality and fidelity in one pass, so that nothing is compiled twice: `python benchmarks/plans.py`."""

from cases import report
from fidelity import FIDELITY
from quality import QUALITY

if __name__ == "__main__":
    report(QUALITY, FIDELITY)
