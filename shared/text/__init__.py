"""Text on the way in and out: chat templates, tokenizers, incremental decoding, stop strings."""

from shared.text.codec import Detokenizer, Message, TextCodec
from shared.text.stops import StopStrings

__all__ = ["Detokenizer", "Message", "StopStrings", "TextCodec"]
