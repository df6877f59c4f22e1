"""Checks every annotated tensor shape while the tests run."""

import sys
import types

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# jaxtyping imports its type checker by name; this one reads `float` as PEP 484 does, so that an int will do.
_checker = types.ModuleType("icrl_gym_shape_checker")
_checker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))
sys.modules[_checker.__name__] = _checker

install_import_hook("icrl_gym", f"{_checker.__name__}.check")
