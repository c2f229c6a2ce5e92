"""``python -m shardplan``: the command line without its script on the path."""

import sys

from shardplan.cli import main

sys.exit(main())
