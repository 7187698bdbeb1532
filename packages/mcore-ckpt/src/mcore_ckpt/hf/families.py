# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a family of models is described with, for families of your own.

Give a `Family` as ``family`` to an import or an export; or name it in a package, and every function and command finds it by its name and
by the model_type of config.json:

    [project.entry-points."mcore_ckpt.hf_families"]
    mine = "my_package.families:MINE"
"""

from mcore_ckpt.hf._families import ENTRY_POINTS, find_family
from mcore_ckpt.hf._fields import Codec, Family, named, renamed, same
from mcore_ckpt.hf._rules import LETTERS, Form, HFPart, PartLayout, WeightRule, rename_weights

__all__ = [
    "ENTRY_POINTS",
    "LETTERS",
    "Codec",
    "Family",
    "Form",
    "HFPart",
    "PartLayout",
    "WeightRule",
    "find_family",
    "named",
    "rename_weights",
    "renamed",
    "same",
]
