# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stand-ins of the stability markers: the gate reads their names only."""


def internal_api(obj):
    return obj


def experimental_api(obj):
    return obj


def deprecated(version, removal_version, alternative=None):
    return lambda obj: obj


def pep702_deprecated(message):
    return lambda obj: obj
