"""Shapes in signatures: jaxtyping's names where it is installed, and harmless stand-ins where it is not.

The test run has jaxtyping and beartype and checks every annotated shape; a user's installation needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Shaped:
            def __class_getitem__(cls, item: tuple[type, str]) -> type:
                return item[0]

        Bool = Float = Int = _Shaped

__all__ = ["Bool", "Float", "Int"]
