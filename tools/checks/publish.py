# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Build a wheel twice with the same bytes, list its ingredients, and rehearse its upload on an index of this machine.

python -m tools.checks.publish build mcore-moe --out dist/release
python -m tools.checks.publish rehearse mcore-moe
"""

import argparse
import contextlib
import functools
import hashlib
import html
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tools.checks._tree import ROOT, Wheel, distributions


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def needed(wheel: str, tree: dict[str, Wheel]) -> list[str]:
    """The wheel and the siblings that it depends on, directly or not; siblings first."""
    names: list[str] = []
    for requirement in tree[wheel].dependencies:
        if requirement.name in tree:
            names += [sibling for sibling in needed(requirement.name, tree) if sibling not in names]
    return [*names, wheel]


def dependents(wheel: str, tree: dict[str, Wheel]) -> list[str]:
    """Wheels that need this one, directly or not."""
    return [name for name in tree if name != wheel and wheel in needed(name, tree)]


def build(wheel: str, out: Path, *, uv: str, constraints: Path, root: Path = ROOT) -> list[Path]:
    """Wheel and source distribution, built twice from clean folders.

    Raises:
        ValueError: the two builds differ.
    """
    epoch = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    # Times in the archives are those of the commit, not of the build.
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch or "315532800"}
    command = [uv, "build", "-q", "--package", wheel, "--python", sys.executable, "--build-constraint", str(constraints)]
    with tempfile.TemporaryDirectory() as name:
        copies = Path(name, "first"), Path(name, "second")
        for copy in copies:
            subprocess.run([*command, "--out-dir", str(copy)], cwd=root, env=environment, check=True)
        files = [sorted(path for path in copy.iterdir() if path.suffix in (".whl", ".gz")) for copy in copies]
        different = [one.name for one, other in zip(*files, strict=True) if digest(one) != digest(other)]
        if different:
            raise ValueError(f"two builds of one commit differ in {', '.join(different)}; look for times, orders or paths in the build")
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, out)) for path in files[0]]


def bill_of_materials(wheel: Wheel, files: Iterable[Path]) -> dict[str, Any]:
    """CycloneDX 1.6: the wheel, its files, and what it declares to need. The same commit gives the same text."""
    name, version = wheel.name, str(wheel.version)
    top = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"license": {"id": wheel.project["license"]}}],
        "components": [
            {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": digest(path)}]} for path in sorted(files)
        ],
    }
    declared = [(requirement, "required") for requirement in wheel.dependencies]
    declared += [(requirement, "optional") for requirements in wheel.extras.values() for requirement in requirements]
    components: dict[str, dict[str, Any]] = {}
    for requirement, scope in declared:
        ref = f"pkg:pypi/{requirement.name}"
        component = {"type": "library", "bom-ref": ref, "name": requirement.name, "purl": ref, "scope": scope, "properties": []}
        said = {"name": "requirement", "value": str(requirement)}
        # What several extras ask for is one component, and required where the wheel itself asks for it.
        properties = components.setdefault(ref, component)["properties"]
        properties += [said] if said not in properties else []
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": top},
        "components": [components[ref] for ref in sorted(components)],
        "dependencies": [{"ref": top["bom-ref"], "dependsOn": sorted(components)}],
    }


def publish(files: Iterable[Path], index: Path) -> None:
    """Put files into a simple index (PEP 503) with the hash of each.

    Raises:
        ValueError: the index has a file of that name with other bytes, as an index of packages would say.
    """
    for path in files:
        project = index / path.name.partition("-")[0].replace("_", "-").lower()
        project.mkdir(parents=True, exist_ok=True)
        target = project / path.name
        if target.exists() and digest(target) != digest(path):
            raise ValueError(f"{path.name} is on the index with other bytes; a released version does not change, raise it")
        shutil.copy(path, target)
        links = [
            f'<a href="{html.escape(one.name)}#sha256={digest(one)}">{html.escape(one.name)}</a>'
            for one in sorted(project.iterdir())
            if one.suffix in (".whl", ".gz")
        ]
        (project / "index.html").write_text("<!DOCTYPE html>\n" + "<br>\n".join(links) + "\n")
    names = sorted(path.name for path in index.iterdir() if path.is_dir())
    (index / "index.html").write_text("<!DOCTYPE html>\n" + "<br>\n".join(f'<a href="{name}/">{name}</a>' for name in names) + "\n")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def serving(index: Path) -> Iterator[str]:
    """Address of the index while it is served on loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(index)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rehearse(wheel: str, tree: dict[str, Wheel], *, uv: str, constraints: Path) -> None:
    """Upload the wheel and its siblings to an index of this machine, install it from there by name, import it."""
    family = needed(wheel, tree)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for one in family:
            publish(build(one, folder / "built", uv=uv, constraints=constraints), folder / "index")
        python = folder / "venv" / "bin" / "python"
        environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        run = functools.partial(subprocess.run, cwd=folder, env=environment, check=True)
        with serving(folder / "index") as address:
            run([uv, "venv", "-q", "--no-python-downloads", "--python", sys.executable, str(python.parent.parent)])
            install = [uv, "pip", "install", "-q", "--python", str(python), "--index", address, "-c", str(constraints)]
            run([*install, *(argument for one in family for argument in ("--refresh-package", one)), f"{wheel}=={tree[wheel].version}"])
        run([uv, "pip", "check", "-q", "--python", str(python)])
        modules = [(one, tree[one].module, str(tree[one].version)) for one in family]
        source = "import importlib, importlib.metadata\n" + "\n".join(
            f"assert importlib.metadata.version({one!r}) == {version!r}; importlib.import_module({module!r})"
            for one, module, version in modules
        )
        run([str(python), "-I", "-c", source])
    print(f"rehearsal: {wheel} {tree[wheel].version} installs from an index by name, with {', '.join(family[:-1]) or 'no sibling'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("build", "rehearse", "dependents"))
    parser.add_argument("wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument("--uv", default="uv", help="the uv program")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints" / "dev.txt")
    options = parser.parse_args()
    tree = distributions()
    if options.wheel not in tree:
        print(f"no wheel {options.wheel!r}; the wheels are {', '.join(tree)}", file=sys.stderr)
        return 2
    wheel = tree[options.wheel]
    constraints = options.constraints.resolve()
    try:
        if options.task == "dependents":
            print("\n".join(dependents(wheel.name, tree)))
        elif options.task == "rehearse":
            rehearse(wheel.name, tree, uv=options.uv, constraints=constraints)
        else:
            files = build(wheel.name, options.out, uv=options.uv, constraints=constraints)
            bill = json.dumps(bill_of_materials(wheel, files), indent=1, sort_keys=True)
            (options.out / f"{wheel.module}-{wheel.version}.cdx.json").write_text(bill + "\n")
            (options.out / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
            print(f"build: {', '.join(path.name for path in files)}, twice the same bytes")
    except (ValueError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
