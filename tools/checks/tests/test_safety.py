# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Each forbidden use is found under whatever name it comes, and its harmless neighbours are not."""

import pytest

from tools.checks.safety import findings_in


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import dill, json",
        "import joblib",
        "import shelve",
        "import marshal",
        "def f():\n    import cloudpickle",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "import torch\nread = torch.load",
        "import yaml\nyaml.load(text)",
        "from yaml import load as read",
        "import yaml\nyaml.unsafe_load(text)",
        "eval('1')",
        "exec(code)",
        "run = exec",
        "compile(text, 'x', 'exec')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "load('x', allow_pickle=flag)",
        "import torch.distributed as dist\ndist.all_gather_object(out, x)",
        "from torch.distributed import broadcast_object_list",
        "import os\nos.system('ls')",
        "message = socket.recv_pyobj()",
        "self._socket.send_pyobj(message)",
        "send = socket.send_pyobj",
    ],
)
def test_uses_that_run_foreign_code_are_found(text):
    assert findings_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.loads = 1",
        "model.eval()",
        "import re\nre.compile('a')",
        "import torch\ntorch.compile(model)",
        "import yaml\nyaml.safe_load(text)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import json\njson.load(file)",
        "from mcore_ckpt import load\nload(state, folder)",
        "# pickle is never used\ntext = 'pickle'",
        "def evaluate(): ...",
    ],
)
def test_harmless_neighbours_pass(text):
    assert findings_in(text) == []


def test_findings_carry_their_line():
    (finding,) = findings_in("x = 1\n\nimport pickle\n")
    assert finding.line == 3 and "pickle" in finding.what
