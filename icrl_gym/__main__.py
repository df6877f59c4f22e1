"""`python -m icrl_gym` is `icrl-gym`."""

import sys

from icrl_gym.cli import main

sys.exit(main())
