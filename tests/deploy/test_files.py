# SPDX-License-Identifier: Apache-2.0
"""A chain of deploy files, read as the host reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_speech_accel.deploy.files import read_chain
from omni_speech_accel.plugin.settings import SettingsError


def test_chain_knows_the_files_of_the_host(tmp_path: Path) -> None:
    folder = tmp_path / "host" / "deploy"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text("async_chunk: true")
    (tmp_path / "mid.yaml").write_text("base_config: host/deploy/model.yaml")
    (tmp_path / "link.yaml").symlink_to(folder / "model.yaml")
    (tmp_path / "top.yaml").write_text("base_config: mid.yaml")
    chain = read_chain(tmp_path / "top.yaml", folder)
    assert [(Path(file.path).name, file.stock) for file in chain] == [
        ("top.yaml", False),
        ("mid.yaml", False),
        ("model.yaml", True),
    ]
    assert [file.stock for file in read_chain(tmp_path / "link.yaml", folder)] == [True]


def test_missing_base_names_who_asks_and_where_the_host_has_one(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "model.yaml").write_text("{}")
    (tmp_path / "my.yaml").write_text("base_config: model.yaml")
    with pytest.raises(FileNotFoundError) as caught:
        read_chain(tmp_path / "my.yaml", tmp_path / "deploy")
    assert str(tmp_path / "my.yaml") in str(caught.value)
    assert str(tmp_path / "deploy" / "model.yaml") in str(caught.value)


def test_environment_variable_in_base_config_is_read_as_the_host_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni.config.stage_config import resolve_deploy_yaml

    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "model.yaml").write_text("async_chunk: true")
    (tmp_path / "my.yaml").write_text('base_config: "${oc.env:OMNI_DEPLOY_DIR}/${oc.env:NO_SUCH,model}.yaml"')
    monkeypatch.delenv("OMNI_DEPLOY_DIR", raising=False)
    with pytest.raises(SettingsError, match=r"my\.yaml cannot be read.*'OMNI_DEPLOY_DIR' not found"):
        read_chain(tmp_path / "my.yaml", tmp_path / "deploy")
    monkeypatch.setenv("OMNI_DEPLOY_DIR", str(tmp_path / "deploy"))
    assert [file.stock for file in read_chain(tmp_path / "my.yaml", tmp_path / "deploy")] == [False, True]
    assert resolve_deploy_yaml(tmp_path / "my.yaml")["async_chunk"] is True


def test_circle_of_bases_is_an_error_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_config: b.yaml")
    (tmp_path / "b.yaml").write_text("base_config: a.yaml")
    with pytest.raises(ValueError, match="circle"):
        read_chain(tmp_path / "a.yaml", tmp_path)


def test_chain_is_the_files_that_the_host_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.config import stage_config

    folder = Path(stage_config._DEPLOY_DIR)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mid.yaml").write_text(f"base_config: {folder / 'minicpmo_4_5_turn.yaml'}")
    (tmp_path / "top.yaml").write_text("base_config: sub/mid.yaml")
    seen: list[Path] = []
    real = stage_config.load_yaml_config

    def spy(path: str | Path) -> Any:
        seen.append(Path(path))
        return real(path)

    monkeypatch.setattr(stage_config, "load_yaml_config", spy)
    stage_config.load_deploy_config(tmp_path / "top.yaml")
    assert [Path(file.path) for file in read_chain(tmp_path / "top.yaml", folder)] == seen
    assert len(seen) >= 4
