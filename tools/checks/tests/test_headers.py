# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the header check accepts and what it refuses."""

import pytest

from tools.checks.headers import LICENCE, findings_in

HEAD = "\n".join(LICENCE) + "\n"


@pytest.mark.parametrize("text", ["", HEAD + '"""Doc."""\n', "#!/usr/bin/env python\n" + HEAD + '"""Doc."""\nx = 1\n'])
def test_complete_sources_pass(text):
    assert findings_in(text, python=True) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"""Doc."""\n', "SPDX"),
        (HEAD, "docstring"),
        (HEAD + "x = 1\n", "docstring"),
        ("\n" + HEAD + '"""Doc."""\n', "SPDX"),
        (HEAD + '"""Doc."""\nname = "caf\u00e9"\n', "line 4 is not ASCII"),
    ],
)
def test_each_fault_is_named(text, problem):
    (finding,) = findings_in(text, python=True)
    assert problem in finding


def test_other_sources_need_the_licence_only():
    assert findings_in(HEAD + "name: ci\n", python=False) == []
    assert len(findings_in("name: ci\n", python=False)) == 1
