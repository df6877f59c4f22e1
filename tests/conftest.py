"""Checks every annotated tensor shape while the tests run."""

from jaxtyping import install_import_hook

install_import_hook("icrl_gym", "beartype.beartype")
