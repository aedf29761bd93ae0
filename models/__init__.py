"""Decoders in Flax NNX: weights, tokenizers, teacher forcing, and decoding with a key-value cache."""

from models.cache import KVCache
from models.config import DecoderConfig
from models.decoder import Decoder
from models.load import load
from models.tokenizer import Tokenizer

__all__ = ["Decoder", "DecoderConfig", "KVCache", "Tokenizer", "load"]
