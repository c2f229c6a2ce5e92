"""``python -m shardplan``: the command line, where its script is not on the path."""

import sys

from shardplan.cli import main

sys.exit(main())
