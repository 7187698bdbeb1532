# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every task of the repository: ``pip install nox uv && nox -s tests`` needs nothing but Python."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
WHEELS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# What the root's pyproject.toml declares, on all of them.
APPLICATION = "mcore-tools"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# The oldest torch that a wheel declares, the pinned one, the newest of the index.
TORCHES = ["lowest", "locked", "newest"]
MATRIX = [
    nox.param(wheel, python, torch, id=f"{wheel}, python={python}, torch={torch}")
    for wheel in WHEELS
    for python in PYTHONS
    for torch in TORCHES
]
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CONSTRAINTS = "constraints/dev.txt"
# Extras that build or run only beside a GPU, are large, or talk to a service: no session installs them.
GPU_EXTRAS = {"cuda", "flashinfer", "modelopt", "ray", "te", "trackio", "wandb"}
# What follows torch's own release or is bounded by it; the sessions that change torch must not be held by these pins.
TORCH_FAMILY = ("cuda-", "nvidia-", "setuptools=", "torch=", "triton=")
# Tests of a file in one process, in the order of conftest.py.
BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]
# Of two hosts, browsers, proxies.
PROGRAM_TESTS = [
    "packages/mcore-inference/tests/test_playground.py",
    "tools/tests/test_cut_network.py",
    "tools/tests/test_deploy.py",
    "tools/tests/test_serve_hosts.py",
]
# All that a file has but campaigns and tests of GPUs; alone, pytest leaves out journeys too.
WITH_JOURNEYS = ["-m", "not gpu and not slow"]
# Three on two cores: tests of servers and of lost ranks wait, and leave their core to others meanwhile.
PROCESSES = min(8, (3 * (os.cpu_count() or 1) + 1) // 2)
# Settings that would leave a trace of this machine in the constraint file.
INDEX_SETTINGS = ("UV_FIND_LINKS", "UV_TORCH_BACKEND", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL")

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types", "imports"]


def _find_uv() -> str:
    """uv as installed beside nox, which need not be on PATH, else the one on PATH."""
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return shutil.which("uv") or "uv"


def _pip_setting(name: str) -> str:
    """What pip was told on this machine, empty if nothing."""
    if value := os.environ.get("PIP_" + name.upper().replace("-", "_")):
        return value
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _enable_pyenv_versions() -> None:
    """pyenv leaves shims for versions that are not enabled; enable those of PYTHONS, the running one first."""
    if "PYENV_VERSION" in os.environ or not (pyenv := shutil.which("pyenv")):
        return
    names = subprocess.run([pyenv, "versions", "--bare"], capture_output=True, text=True, check=False).stdout.split()
    known = [name for name in names if name.rpartition(".")[0] in PYTHONS]
    if known:
        os.environ["PYENV_VERSION"] = ":".join(sorted(known, key=lambda name: not name.startswith(f"{THIS_PYTHON}.")))


UV = _find_uv()
# uv reads none of pip's settings: what pip was told, uv is told too. pip separates by blanks, uv by commas.
if "UV_FIND_LINKS" not in os.environ and (links := _pip_setting("find-links")):
    os.environ["UV_FIND_LINKS"] = ",".join(links.split())
if "SSL_CERT_FILE" not in os.environ and (certificates := _pip_setting("cert")):
    os.environ["SSL_CERT_FILE"] = certificates
# Without bytecode on the disk every process that a test starts compiles torch anew: 10 s of a core instead of 2.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_enable_pyenv_versions()


def _members() -> list[str]:
    """Arguments that install the application and the six wheels in editable form, with every extra that this machine can hold."""
    arguments = []
    for name in (APPLICATION, *WHEELS):
        folder = "." if name == APPLICATION else f"packages/{name}"
        extras = ",".join(_extras(name))
        arguments += ["-e", f"{folder}[{extras}]" if extras else folder]
    return arguments


def _extras(name: str) -> list[str]:
    folder = ROOT if name == APPLICATION else ROOT / "packages" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return sorted(set(project.get("optional-dependencies", {})) - GPU_EXTRAS)


def _siblings(wheel: str) -> list[str]:
    """Wheels of this repository that a wheel needs, directly or not."""
    project = tomllib.loads((ROOT / "packages" / wheel / "pyproject.toml").read_text())["project"]
    declared = [re.split(r"[^\w-]", text, maxsplit=1)[0] for text in project.get("dependencies", [])]
    direct = [name for name in declared if name in WHEELS]
    return sorted({name for sibling in direct for name in (sibling, *_siblings(sibling))})


def _dependents(wheel: str) -> list[str]:
    """Wheels of this repository that need a wheel, directly or not."""
    return [name for name in WHEELS if wheel in _siblings(name)]


def _groups(names: tuple[str, ...]) -> list[str]:
    return [argument for name in names for argument in ("--group", f"pyproject.toml:{name}")]


def _fingerprint(*more: str) -> str:
    """Of everything that decides what an environment holds."""
    digest = hashlib.sha256("\n".join([sys.version, os.environ.get("UV_FIND_LINKS", ""), *more]).encode())
    for path in [ROOT / "pyproject.toml", ROOT / CONSTRAINTS, *(ROOT / "packages" / wheel / "pyproject.toml" for wheel in WHEELS)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _environment(
    session: nox.Session, name: str, stamp: str, install: list[str], *, python: str = sys.executable, stable: bool = True
) -> Path:
    """Make or reuse the environment .nox/<name>; its interpreter.

    The stamp says what was installed: while the fingerprint stands there, a second run installs nothing and asks no index. With ``stable``
    the arguments of the installation are part of it; without, they hold names of temporary files, and the stamp must say what counts.
    """
    folder = ROOT / ".nox" / name
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marks = folder / "installed"
    fingerprint = f"{stamp} {_fingerprint(*(install if stable else ()))}"
    if not interpreter.exists():
        _require_python(session, python)
        session.run_install(UV, "venv", "-q", "--clear", "--no-python-downloads", "--python", python, str(folder), external=True)
    if not marks.exists() or fingerprint not in marks.read_text().splitlines():
        session.run_install(UV, "pip", "install", "-q", "--python", str(interpreter), *install, external=True)
        session.run_install(UV, "pip", "check", "-q", "--python", str(interpreter), external=True)
        with marks.open("a") as file:
            file.write(fingerprint + "\n")
    # Tools that start tools (type checker, torch's compiler) find the same environment.
    session.env["VIRTUAL_ENV"] = str(folder)
    session.env["PATH"] = os.pathsep.join([str(interpreter.parent), os.environ["PATH"]])
    return interpreter


def _require_python(session: nox.Session, python: str) -> None:
    """Without that interpreter the session is skipped; in CI, which installs what it names, it fails."""
    if subprocess.run([UV, "python", "find", "-q", "--no-python-downloads", python], capture_output=True, check=False).returncode:
        (session.error if "CI" in os.environ else session.skip)(f"no Python {python} on this machine")


def _dev(session: nox.Session, *groups: str) -> Path:
    """The one editable environment of this Python version; a session adds the tool groups that it needs to it."""
    install = [*_members(), *_groups(groups), "-c", CONSTRAINTS]
    return _environment(session, f"dev-{THIS_PYTHON}", "+".join(groups), install)


def _without_torch_family(folder: str) -> str:
    """The constraints less the pins that follow torch."""
    lines = (ROOT / CONSTRAINTS).read_text().splitlines()
    path = Path(folder) / "constraints.txt"
    path.write_text("\n".join(line for line in lines if not line.startswith(TORCH_FAMILY)))
    return str(path)


def _torch_constraints(folder: str, wheel: str, torch: str) -> str:
    """The constraints with torch at the oldest version that a wheel declares, or free; what follows torch is free."""
    path = Path(_without_torch_family(folder))
    if torch == "lowest":
        project = tomllib.loads((ROOT / "packages" / wheel / "pyproject.toml").read_text())["project"]
        floor = next(text.partition(">=")[2].split(",")[0] for text in project["dependencies"] if text.startswith("torch>="))
        # The triton of that torch interprets kernels beside an older numpy only.
        pins = [line for line in path.read_text().splitlines() if not line.startswith("numpy=")]
        path.write_text("\n".join([*pins, f"torch=={floor}.*", "numpy<2.4", ""]))
    return str(path)


def _pytest(session: nox.Session, *marked: str) -> list[str]:
    """Pytest's arguments: which marks, then those of the session; without any, all tests on all cores."""
    return ["-q", *marked, *(session.posargs or ["-n", str(PROCESSES), *BY_FILE])]


def _check(session: nox.Session, python: Path, name: str, *arguments: str) -> None:
    session.run(str(python), "-m", f"tools.checks.{name}", *arguments, external=True)


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """Walk the whole journey on a small model: text to checkpoint to completions to rewards."""
    python = _dev(session)
    session.run(str(python), "-m", "mcore_tools.quickstart", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The tests that need no GPU, less journeys, on all cores; arguments go to pytest, which then runs in one process."""
    python = _dev(session, "test", "api")
    session.run(str(python), "-m", "pytest", *_pytest(session), external=True)


@nox.session(venv_backend="none")
def journeys(session: nox.Session) -> None:
    """The tests marked journey: whole commands, several processes, whatever takes longer than about two seconds."""
    python = _dev(session, "test", "api")
    session.run(str(python), "-m", "pytest", *_pytest(session, "-m", "journey and not gpu and not slow"), external=True)


@nox.session(venv_backend="none")
def programs(session: nox.Session) -> None:
    """The tests that drive programs of the system, as root after `.ci/programs`: what lacks fails here, and is skipped elsewhere."""
    python = _dev(session, "test", "api")
    arguments = session.posargs or PROGRAM_TESTS
    session.run(str(python), "-m", "pytest", "-q", *WITH_JOURNEYS, *arguments, env={"MCORE_REQUIRE_PROGRAMS": "1"}, external=True)


@nox.session(venv_backend="none")
def campaigns(session: nox.Session) -> None:
    """The tests marked slow: long campaigns and rare layouts, whose short forms are among tests and journeys."""
    python = _dev(session, "test", "api")
    arguments = ["-q", "-m", "slow and not gpu", *(session.posargs or ["-n", "auto", "--maxprocesses", "8", *BY_FILE])]
    session.run(str(python), "-m", "pytest", *arguments, external=True)


@nox.session(venv_backend="none")
def parity(session: nox.Session) -> None:
    """Every family of models in every layout against transformers; `-- --write-table` writes the figures and docs/models.md."""
    python = _dev(session, "test")
    session.run(str(python), "-m", "pytest", "-q", "-m", "not gpu", "tests/parity", *session.posargs, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Code style and formatting, then the GitHub files: their schema and their safety."""
    python = _dev(session, "lint")
    session.run(str(python), "-m", "ruff", "check", "--no-cache", external=True)
    session.run(str(python), "-m", "ruff", "format", "--no-cache", "--check", external=True)
    workflows = [str(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    schema = [str(python), "-m", "check_jsonschema", "--builtin-schema"]
    session.run(*schema, "vendor.github-workflows", *workflows, external=True)
    session.run(*schema, "vendor.dependabot", ".github/dependabot.yml", external=True)
    session.run(str(python.parent / "zizmor"), "--offline", "--quiet", "--no-progress", "--strict-collection", ".github", external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Type checks of the wheels and tools."""
    python = _dev(session, "test", "api", "types")
    session.run(str(python), "-m", "basedpyright", "--pythonpath", str(python), "--level", "error", *session.posargs, external=True)


@nox.session(venv_backend="none")
def imports(session: nox.Session) -> None:
    """Who may import whom, between the wheels and inside the trunk, and by public names only."""
    python = _dev(session, "lint")
    session.run(str(python.parent / "lint-imports"), "--no-cache", external=True)
    _check(session, python, "imports_public")


@nox.session(venv_backend="none")
def headers(session: nox.Session) -> None:
    """Licence lines and a docstring at the top of every source file."""
    _check(session, _dev(session, "test"), "headers")


@nox.session(venv_backend="none")
def safety(session: nox.Session) -> None:
    """Nothing in a wheel can run code that it reads from a file or a socket."""
    _check(session, _dev(session, "test"), "safety")


@nox.session(venv_backend="none")
def vendored(session: nox.Session) -> None:
    """Files that every wheel carries are the same in all of them."""
    _check(session, _dev(session, "test"), "vendored")


@nox.session(venv_backend="none")
def workspace(session: nox.Session) -> None:
    """Sibling ranges, lower bounds, declared against imported, no trace of a machine."""
    python = _dev(session, "test")
    _check(session, python, "workspace")
    _check(session, python, "closure")


@nox.session(venv_backend="none")
def api(session: nox.Session) -> None:
    """Public API of each wheel against its last release; arguments go to the gate."""
    python = _dev(session, "test", "api")
    session.run(str(python), "tools/checks/api.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The site with its API reference, without a warning and on a phone, and every code block of README and docs."""
    python = _dev(session, "test", "docs")
    # A fork's site links the fork.
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    link = {"REPOSITORY_URL": f"{server}/{repository}"} if server and repository else {}
    output = session.run(str(python.parent / "zensical"), "build", "--strict", "--clean", env=link, external=True, silent=True)
    print(output)
    # Its strict mode knows broken links, not docstrings that document a parameter which does not exist.
    if warnings := [line for line in str(output).splitlines() if line.startswith("griffe: ")]:
        session.error(f"{len(warnings)} docstrings disagree with their signatures")
    # Where zensical is missing, as beside all other tests, it is skipped.
    session.run(str(python), "-m", "pytest", "-q", "-n", "0", "tools/checks/tests/test_site_width.py", external=True)
    _check(session, python, "codeblocks", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """One measurement of tools/bench: `-- elementwise --tokens 1024`; without a name, small models against transformers on a CPU."""
    known = sorted(path.stem for path in (ROOT / "tools" / "bench").glob("[!_]*.py"))
    name, *more = session.posargs or ["train"]
    if name not in known:
        session.error(f"name what to measure: `nox -s bench -- NAME`, with NAME one of {', '.join(known)}")
    python = _dev(session)
    session.run(str(python), "-m", f"tools.bench.{name}", *more, external=True)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Wheels and source distributions of the application and of all six into dist/."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    constraint = ["--build-constraint", CONSTRAINTS]
    session.run(UV, "build", "-q", "--all-packages", "--python", sys.executable, *constraint, "--out-dir", "dist", external=True)
    session.log(", ".join(sorted(path.name for path in (ROOT / "dist").iterdir() if path.suffix in {".whl", ".gz"})))


@nox.session(venv_backend="none")
@nox.parametrize("wheel", [*WHEELS, APPLICATION])
def install_alone(session: nox.Session, wheel: str) -> None:
    """One built wheel in a clean environment: only what it declares is there, it imports fast, its README runs."""
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in (ROOT / "dist").glob("*.whl")}
    if wheel not in built:
        session.error("the wheel is not in dist/: run `nox -s build` first")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # By path, and outside the repository: neither an index nor the workspace may answer for a wheel of ours.
        siblings = folder / "siblings.txt"
        siblings.write_text("\n".join(f"{name} @ {path.as_uri()}" for name, path in built.items()))
        python = str(folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
        outside = folder / "outside"
        outside.mkdir()
        with session.chdir(outside):
            session.run_install(UV, "venv", "-q", "--no-python-downloads", "--python", sys.executable, str(folder / "venv"), external=True)
            constraints = ["-c", str(ROOT / CONSTRAINTS), "-c", str(siblings)]
            session.run_install(UV, "pip", "install", "-q", "--python", python, str(built[wheel]), *constraints, external=True)
            session.run(UV, "pip", "check", "-q", "--python", python, external=True)
            session.run(python, "-I", str(ROOT / "tools/checks/closure.py"), "--installed", wheel, external=True)
            if wheel == APPLICATION:
                session.run(str(Path(python).parent / "mcore"), "--version", external=True)
                session.run(python, "-I", str(ROOT / "tests/journey/new_user.py"), str(outside), external=True)
            readme = str(ROOT / ("tools" if wheel == APPLICATION else f"packages/{wheel}") / "README.md")
            session.run(python, "-I", str(ROOT / "tools/checks/codeblocks.py"), "--first", readme, external=True)


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Gate, test and build the one wheel that a tag releases: `-- mcore-moe-v0.2.0`; `--rehearse` before the tag exists."""
    rehearsal = "--rehearse" in session.posargs
    tags = [argument for argument in session.posargs if argument != "--rehearse"]
    if len(tags) != 1 or "-v" not in tags[0]:
        session.error("name the tag: `nox -s release -- <wheel>-vX.Y.Z`")
    wheel = tags[0].removeprefix("refs/tags/").rpartition("-v")[0]
    python = _dev(session, "test", "api")
    target = ROOT / "dist" / "release"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    mode = ["--rehearsal"] if rehearsal else []
    _check(session, python, "release", tags[0], "--notes", str(target / "notes.md"), *mode)
    # The application has no interface to keep; it is released on wheels whose interfaces stand.
    affected = WHEELS if wheel == APPLICATION else [wheel, *_dependents(wheel)]
    session.run(str(python), "tools/checks/api.py", *(part for name in affected for part in ("--wheel", name)), external=True)
    folder = "tools/tests" if wheel == APPLICATION else f"packages/{wheel}/tests"
    session.run(str(python), "-m", "pytest", "-q", *WITH_JOURNEYS, "-n", "2", *BY_FILE, folder, external=True)
    _check(session, python, "publish", "build", wheel, "--uv", UV, "--out", str(target))
    _check(session, python, "publish", "rehearse", wheel, "--uv", UV)


@nox.session(venv_backend="none")
@nox.parametrize("wheel", [*WHEELS, APPLICATION], ids=[*WHEELS, APPLICATION])
def rehearse(session: nox.Session, wheel: str) -> None:
    """Publish a wheel and its siblings to an index of this machine and install it from there by name."""
    python = _dev(session, "test")
    _check(session, python, "publish", "rehearse", wheel, "--uv", UV)


@nox.session(venv_backend="none")
def consumers(session: nox.Session) -> None:
    """Tests of each dependent's last release against the wheels of this tree."""
    python = _dev(session, "test")
    _check(session, python, "consumers", "--uv", UV, "--constraints", CONSTRAINTS, *session.posargs)


@nox.session(venv_backend="none", tags=["matrix"])
@nox.parametrize("wheel,python_version,torch", MATRIX)
def tests_wheel(session: nox.Session, wheel: str, python_version: str, torch: str) -> None:
    """One wheel's tests beside what it declares and the test group only: `nox -s "tests_wheel(mcore-moe, python=3.12, torch=newest)"`."""
    extras = ",".join(_extras(wheel))
    install = ["-e", f"packages/{wheel}[{extras}]" if extras else f"packages/{wheel}"]
    # Siblings come from this tree, whatever an index has.
    install += [argument for name in _siblings(wheel) for argument in ("-e", f"packages/{name}")]
    with tempfile.TemporaryDirectory() as folder:
        pins = CONSTRAINTS if torch == "locked" else _torch_constraints(folder, wheel, torch)
        stamp = f"{torch} {Path(pins).read_text() if torch != 'locked' else ''}".replace("\n", " ")
        install += [*_groups(("test",)), "-c", pins]
        place = f"wheel-{wheel}-{python_version}-{torch}"
        python = _environment(session, place, hashlib.sha256(stamp.encode()).hexdigest(), install, python=python_version, stable=False)
    session.run(str(python), "-c", "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)", external=True)
    arguments = session.posargs or ["-n", "2", *BY_FILE]
    session.run(str(python), "-m", "pytest", "-q", *WITH_JOURNEYS, *arguments, f"packages/{wheel}/tests", external=True)


@nox.session(venv_backend="none")
def lowest(session: nox.Session) -> None:
    """All tests with the oldest version of every direct dependency: the lower bounds are true."""
    install = [*_members(), *_groups(("test", "api")), "--resolution", "lowest-direct"]
    python = _environment(session, f"lowest-{THIS_PYTHON}", "lowest", install)
    session.run(str(python), "-m", "pytest", *_pytest(session, *WITH_JOURNEYS), external=True)


@nox.session(venv_backend="none")
def newest(session: nox.Session) -> None:
    """All tests with the newest torch of the index, whatever is pinned."""
    with tempfile.TemporaryDirectory() as folder:
        python = ROOT / ".nox" / f"newest-{THIS_PYTHON}" / "bin" / "python"
        session.run_install(UV, "venv", "-q", "--clear", "--no-python-downloads", str(python.parent.parent), external=True)
        constraints = ["-c", _without_torch_family(folder), "--upgrade"]
        install = ["--python", str(python), *_members(), *_groups(("test", "api")), *constraints]
        session.run_install(UV, "pip", "install", "-q", *install, external=True)
    session.run(str(python), "-c", "import torch; print('torch', torch.__version__)", external=True)
    session.run(str(python), "-m", "pytest", *_pytest(session, *WITH_JOURNEYS), external=True)


@nox.session(venv_backend="none")
def loggers(session: nox.Session) -> None:
    """What the numbers of a run are sent to, by the newest libraries of those services, offline."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        # Trackio wants an older pillow than the plots do.
        lines = (ROOT / CONSTRAINTS).read_text().splitlines()
        constraints.write_text("\n".join(line for line in lines if not line.startswith("pillow=")))
        install = [*_members(), *_groups(("test",)), "trackio>=0.20", "wandb", "-c", str(constraints)]
        python = _environment(session, f"loggers-{THIS_PYTHON}", "loggers", install, stable=False)
    arguments = ["-q", *WITH_JOURNEYS, "-n", "0", "tools/tests/test_loggers.py", *session.posargs]
    session.run(str(python), "-m", "pytest", *arguments, external=True)


@nox.session(venv_backend="none")
def peft(session: nox.Session) -> None:
    """Adapters beside those of the newest PEFT: the same loss curve, and files that each reads of the other."""
    # Where the library is missing, these tests are skipped; here they must not be.
    install = [*_members(), *_groups(("test",)), "peft>=0.18", "-c", CONSTRAINTS]
    python = _environment(session, f"peft-{THIS_PYTHON}", "peft", install)
    session.run(str(python), "-c", "import peft; print('peft', peft.__version__)", external=True)
    tests = ["tools/tests/test_lora_curve.py", "packages/mcore-ckpt/tests/test_hf_adapter.py"]
    session.run(str(python), "-m", "pytest", "-q", *WITH_JOURNEYS, "-n", "0", *tests, *session.posargs, external=True)


@nox.session(venv_backend="none")
def trl(session: nox.Session) -> None:
    """Losses and gradients of RL beside those of the newest TRL's own trainer, and a step of the bench by it."""
    # Where the library is missing, these tests are skipped; here they must not be.
    install = [*_members(), *_groups(("test",)), "trl>=1.16", "-c", CONSTRAINTS]
    python = _environment(session, f"trl-{THIS_PYTHON}", "trl", install)
    session.run(str(python), "-c", "import trl; print('trl', trl.__version__)", external=True)
    tests = ["packages/mcore-rl/tests/test_trl.py", "tools/tests/test_bench_rl_trl.py"]
    session.run(str(python), "-m", "pytest", "-q", *WITH_JOURNEYS, "-n", "0", *tests, *session.posargs, external=True)


@nox.session(venv_backend="none")
def ray(session: nox.Session) -> None:
    """Environments and engines as workers of Ray, on a cluster of two nodes on this machine."""
    install = [*_members(), *_groups(("test",)), "-e", "packages/mcore-rl[ray]", "-c", CONSTRAINTS]
    python = _environment(session, f"ray-{THIS_PYTHON}", "ray", install)
    arguments = ["-q", *WITH_JOURNEYS, "-n", "0", "packages/mcore-rl/tests/test_ray.py", *session.posargs]
    session.run(str(python), "-m", "pytest", *arguments, external=True)


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Recompute the constraint file; `-- --upgrade` moves every pin that may move."""
    extras = sorted({extra for name in (APPLICATION, *WHEELS) for extra in _extras(name)})
    session.run(
        UV, "pip", "compile", "-q", "--universal", "--python-version", PYTHONS[0], "--no-header", "--no-annotate",
        *_groups(("dev",)), "pyproject.toml", *(f"packages/{wheel}/pyproject.toml" for wheel in WHEELS),
        *(argument for extra in extras for argument in ("--extra", extra)),
        *(argument for name in (APPLICATION, *WHEELS) for argument in ("--no-emit-package", name)),
        "-c", "constraints/pins.in", "-o", CONSTRAINTS, *session.posargs,
        external=True, env=dict.fromkeys(INDEX_SETTINGS),
    )  # fmt: skip


@nox.session(venv_backend="none")
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of the pinned versions, as the index reports them: it needs the network, and says so where there is none."""
    # Every pin stands in the file, so nothing is resolved or installed.
    options = ["--requirement", CONSTRAINTS, "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    session.run(UV, "tool", "run", "--from", "pip-audit>=2.9", "pip-audit", *options, *session.posargs, external=True)


@nox.session(venv_backend="none")
def image(session: nox.Session) -> None:
    """The GPU image, tagged with the commit that it holds."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip():
        session.error("the tree has uncommitted changes: the image would not hold the commit that it is tagged with")
    arguments = ["--build-arg", f"COMMIT={commit}", "-f", "docker/Dockerfile", "-t", f"mcore:{commit}", "."]
    session.run("docker", "build", *arguments, *session.posargs, external=True)
