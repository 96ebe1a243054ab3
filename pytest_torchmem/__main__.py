"""``python -m pytest_torchmem`` is the ``torchmem`` command."""

import sys

from pytest_torchmem.cli.main import main

sys.exit(main())
