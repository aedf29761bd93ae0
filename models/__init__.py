"""Decoders in Flax NNX: weights, tokenizers, teacher forcing, and decoding with a key-value cache, on one mesh."""

from models import lora
from models.cache import KVCache
from models.config import DecoderConfig, LoraConfig
from models.decoder import Decoder
from models.export import save
from models.load import load
from models.sharding import MeshRules, make_mesh
from models.tokenizer import Tokenizer
from models.weights import configure, shard

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "LoraConfig",
    "MeshRules",
    "Tokenizer",
    "configure",
    "load",
    "lora",
    "make_mesh",
    "save",
    "shard",
]
