"""One door to every decoder: a folder, a GGUF file, an installed package or a hub name."""

import re
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
from jax.typing import DTypeLike

from models.decoder import Decoder
from models.gguf import read_gguf
from models.huggingface import read_folder
from models.packages import PACKAGES, find_in_package
from models.sharding import MeshRules
from models.tokenizer import Tokenizer, check_vocabulary

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
DECODER_FILE = "decoder.json"  # of `orbax_weights`, which is imported only where it is needed
ALLOWED = f"a folder with config.json, a .gguf file, one of {tuple(PACKAGES)}, or a hub name like 'org/name'"


def load(
    path_or_name: str | Path, dtype: DTypeLike = jnp.float32, rules: MeshRules | None = None
) -> tuple[Decoder, Tokenizer | None]:
    """The decoder with its weights cast to dtype, and its tokenizer, or None where the folder has none.

    Args:
      path_or_name: a folder in the hub's layout, or one that `orbax_weights.save_orbax` wrote; a .gguf file; a name in
        `packages.PACKAGES` where its package is installed; else a hub name, which is downloaded.
      dtype: of the weights, and so of all computation up to the logits.
      rules: the mesh over which the weights are cut as they are read; None: the default device.
    Raises:
      FileNotFoundError: nothing is found under that path or name.
      ValueError: what is found is damaged or of an unsupported kind, or its tokenizer has more ids than the model.
    """
    path = find(path_or_name)
    if (path / DECODER_FILE).is_file():
        from models.orbax_weights import load_orbax

        return load_orbax(path, rules, dtype), None
    if path.is_dir():
        try:
            decoder, tokenizer = read_folder(path, dtype, rules), Tokenizer.from_folder(path)
        except (TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"a file of {path} does not have the expected form: {error!r}") from error
        source = path / "tokenizer.json"
    elif path.suffix == ".gguf":
        (decoder, tokenizer), source = read_gguf(path, dtype, rules), path
    else:
        raise ValueError(f"{path} is no model, allowed: {ALLOWED}")
    if tokenizer is not None:
        check_vocabulary(tokenizer, decoder.config.vocab_size, source)
    return decoder, tokenizer


def find(path_or_name: str | Path) -> Path:
    """The folder or file a path or name stands for, downloaded if it is a hub name; raises as `load`."""
    path, name = Path(path_or_name), str(path_or_name)
    if path.exists():
        return path
    if name.lower() in PACKAGES:
        return find_in_package(name)
    if HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return _download(name)
    raise FileNotFoundError(f"no model at {name!r}, allowed: {ALLOWED}")


def _download(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"no folder {name!r} here, and the hub gave none under that name: {reason}"
        raise FileNotFoundError(message) from None
