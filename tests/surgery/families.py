"""Every family that surgery must work on."""

from __future__ import annotations

from tests.surgery.families_decoder import DECODERS
from tests.surgery.families_other import OTHERS
from tests.surgery.family import Family

FAMILIES: dict[str, Family] = {**DECODERS, **OTHERS}
