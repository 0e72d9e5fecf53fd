"""From a model's name to its directory."""

import pytest

from baton.model_path import CheckpointError, model_name, resolve


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_resolve(checkpoint, monkeypatch):
    assert resolve(str(checkpoint)) == checkpoint
    for name in ("demo", "demo-vision"):
        assert (resolve(name) / "model.safetensors").is_file() and model_name(name) == name
    for name in ("./nowhere", "/no/where", "a/b/c", ""):
        with pytest.raises(CheckpointError, match="no such directory"):
            resolve(name)
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(str(checkpoint / "config.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolve("nobody/no-such-model")


def test_a_directory_is_served_under_its_own_name(checkpoint):
    assert model_name(str(checkpoint)) == checkpoint.name
    assert model_name("demo") == "demo"
    assert model_name("owner/name") == "owner/name"


def test_a_directory_without_config_is_no_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_of_a_repository_no_folders_of_weights_are_fetched(monkeypatch, tmp_path):
    """Llama's has all weights again in original/, gpt-oss' too. The library's own filter decides."""
    from huggingface_hub.utils import filter_repo_objects

    names = [
        *("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"),
        *("additional_chat_templates/tool_use.jinja", "1_Pooling/config.json"),
        *("original/model.safetensors", "original/config.json", "onnx/model.onnx", "pytorch_model.bin"),
    ]
    fetched = []

    def download(model, revision=None, **patterns):
        assert revision == (tmp_path.name if fetched else None)
        fetched.extend(filter_repo_objects(names, **patterns))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("owner/name") == tmp_path
    assert fetched == names[:6]  # but for small ones: further chat templates, and how embeddings are pooled
