# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the gate can find, and how much each finding asks of the next version."""

from dataclasses import dataclass
from enum import IntEnum


class Bump(IntEnum):
    """How far a version must grow. ``NEVER`` is asked by what no version allows."""

    NONE = 0
    ADDITION = 1
    BREAK = 2
    NEVER = 3


class CheckError(Exception):
    """The check could not run; the message says why and what to do."""


# kind -> (what it asks of the version, one sentence for reports)
KINDS: dict[str, tuple[Bump, str]] = {
    "async_changed": (Bump.BREAK, "A function became a coroutine function, or stopped being one."),
    "attribute_read_only": (Bump.BREAK, "An attribute that could be assigned cannot be any more."),
    "attribute_type_changed": (Bump.BREAK, "Code that reads or assigns the attribute no longer type-checks."),
    "abstract_member_added": (Bump.BREAK, "Subclasses must define a member that they did not need before."),
    "alias_narrowed": (Bump.BREAK, "A type alias admits less than before."),
    "base_removed": (Bump.BREAK, "A class no longer derives from a public base class."),
    "binding_changed": (Bump.BREAK, "A method changed between instance, class and static."),
    "class_final": (Bump.BREAK, "A class can no longer be subclassed."),
    "class_frozen": (Bump.BREAK, "Fields of a dataclass can no longer be assigned."),
    "command_added": (Bump.ADDITION, "The wheel installs a new command."),
    "command_removed": (Bump.BREAK, "A command or entry point is gone."),
    "constant_changed": (Bump.ADDITION, "A constant has another value of the same type."),
    "decorator_narrowed": (Bump.BREAK, "A decorator accepts fewer calls than the function under it did."),
    "dependency_added": (Bump.ADDITION, "An update installs a further library."),
    "dependency_narrowed": (Bump.BREAK, "The wheel accepts fewer versions of a library than before."),
    "extra_added": (Bump.ADDITION, "There is a new extra."),
    "extra_removed": (Bump.BREAK, "An extra is gone."),
    "enum_member_added": (Bump.ADDITION, "An enumeration has a new member."),
    "enum_member_removed": (Bump.BREAK, "A member of an enumeration is gone."),
    "enum_value_changed": (Bump.BREAK, "A member of an enumeration has another value."),
    "fields_reordered": (Bump.BREAK, "The fields of a named tuple changed places."),
    "generator_changed": (Bump.BREAK, "A function became a generator function, or stopped being one."),
    "implementer_broken": (Bump.BREAK, "An implementation that conformed before no longer fits the protocol or abstract class."),
    "key_now_required": (Bump.BREAK, "A typed dictionary requires a key that it did not require before."),
    "key_not_promised": (Bump.BREAK, "A key that every typed dictionary had may be missing now."),
    "kind_changed": (Bump.BREAK, "A name means another kind of thing."),
    "member_added": (Bump.ADDITION, "A class has a new public member."),
    "member_removed": (Bump.BREAK, "A public member of a class is gone."),
    "method_final": (Bump.BREAK, "A method can no longer be overridden."),
    "module_added": (Bump.ADDITION, "There is a new public module."),
    "module_removed": (Bump.BREAK, "A public module is gone."),
    "name_added": (Bump.ADDITION, "There is a new public name."),
    "name_moved": (Bump.BREAK, "A public name moved and left nothing behind."),
    "name_removed": (Bump.BREAK, "A public name is gone."),
    "name_unlisted": (Bump.BREAK, "A name can be imported but is no longer in __all__."),
    "overload_removed": (Bump.BREAK, "A call that an overload allowed is no longer allowed."),
    "parameter_added": (Bump.ADDITION, "There is a new optional parameter."),
    "parameter_added_required": (Bump.BREAK, "There is a new parameter without a default."),
    "parameter_default_changed": (Bump.ADDITION, "Callers that leave the parameter out get another value."),
    "parameter_kind_changed": (Bump.BREAK, "A parameter can no longer be passed by position, or by name."),
    "parameter_now_required": (Bump.BREAK, "A parameter lost its default."),
    "parameter_removed": (Bump.BREAK, "A parameter is gone."),
    "parameter_reordered": (Bump.BREAK, "Positional parameters changed places."),
    "parameter_type_changed": (Bump.BREAK, "An argument that was accepted no longer type-checks."),
    "protocol_member_added": (Bump.BREAK, "Implementations of a protocol must define a member that they did not need before."),
    "python_narrowed": (Bump.BREAK, "The wheel accepts fewer versions of Python than before."),
    "return_type_changed": (Bump.BREAK, "The result no longer fits the type that was promised."),
    "trait_lost": (Bump.BREAK, "Instances can no longer be hashed, compared, ordered, frozen, or whatever stands in brackets."),
    "wrapper_changed": (Bump.BREAK, "A function became a context manager, or stopped being one."),
    # the stability ladder and the clock of deprecations
    "deprecated_added": (Bump.ADDITION, "A name is deprecated now."),
    "stability_lowered": (Bump.BREAK, "A stable name became experimental or internal."),
    "deprecation_incomplete": (Bump.NEVER, "A deprecation does not say, as plain strings, since when and until when."),
    "deprecation_too_short": (Bump.NEVER, "A deprecation promises less than two minor versions."),
    "deprecation_backdated": (Bump.NEVER, "A deprecation names a release that does not carry it."),
    "deprecation_postdated": (Bump.NEVER, "A deprecation names a later release than the first that carries it."),
    "deprecation_shortened": (Bump.NEVER, "A deprecation ends earlier than the last release promised."),
    "deprecation_unseen": (Bump.NEVER, "Type checkers do not see a deprecation: the PEP 702 mark is missing."),
    "alternative_unknown": (Bump.NEVER, "A deprecation recommends a public name that does not exist."),
    "removed_too_early": (Bump.NEVER, "A deprecated name went before the version that was promised."),
    "removal_overdue": (Bump.NEVER, "A deprecated name is still there in the version that should have removed it."),
    # what a public surface must look like whatever the version
    "all_missing": (Bump.NEVER, "A public module does not define __all__ in a way that can be read without running it."),
    "config_not_keyword_only": (Bump.NEVER, "A public configuration dataclass takes positional arguments."),
    "export_unresolved": (Bump.NEVER, "__all__ lists a name that does not exist."),
    "name_shadowed": (Bump.NEVER, "A public name is both a submodule and something imported, so that one hides the other."),
    "surface_stale": (Bump.NEVER, "The committed text of the public surface differs from the code."),
    "version_decreased": (Bump.NEVER, "The version is smaller than that of the last release."),
    # acceptances
    "acceptance_unused": (Bump.NEVER, "An accepted break does not occur."),
    "acceptance_void": (Bump.NEVER, "An acceptance was written for a version that has passed."),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One change, or one rule broken.

    Args:
        kind: a key of ``KINDS``.
        path: the public name a user writes; a parameter stands in brackets behind it.
        text: what happened, old before new.
        file: file in the new tree, relative to it.
        line: line in that file, counted from one.
        exempt: why it does not count; empty if it counts.
        detail: longer text for people, for instance a diff.
    """

    kind: str
    path: str
    text: str
    file: str = ""
    line: int = 1
    exempt: str = ""
    detail: str = ""

    @property
    def bump(self) -> Bump:
        return KINDS[self.kind][0]

    @property
    def counts(self) -> bool:
        return not self.exempt
