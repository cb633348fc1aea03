"""The model of most tests of whole runs, one of `tests.table_model`: the last character of a prompt chooses the answer.

1 " alpha beta gamma"     2 " one END|two" (END spans two tokens)     3 an emoji in four byte tokens, then " ok"
5 " p5 q5" for ever       6 end of text at once                       ~ NaN logits
d a digit 0 to 9 and on, for ever, each with the same probability (for sampling)
a chat (whose prompt ends in a newline): " chat reply"
"""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.table_model import Rules, byte_tokenizer, byte_vocab, follow, spelled, table_model

CONTEXT = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('role bad is not allowed') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_SPECIALS = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>", "<|pad|>"]
_PATHS = {
    "1": [" alpha", " beta", " gamma", "<|eos|>"],
    "2": [" one", " EN", "D|two", "<|eos|>"],
    "3": ["\xf0", "\x9f", "\x98", "\x80", " ok", "<|eos|>"],
    "5": [" p5", " q5", " p5"],
    "6": ["<|eos|>"],
    "\n": [" chat", " reply", "<|eos|>"],
}
_DIGITS = [f" d{digit}" for digit in range(10)]


def build_chain_model(directory: Path, *, context: int = CONTEXT, generation: dict | None = None) -> Path:
    """Write the model; `generation` adds settings to its generation_config.json."""
    evenly = [(digit, 20.0) for digit in _DIGITS]
    rules = spelled({"d": evenly, **dict.fromkeys(_DIGITS, evenly), **follow(_PATHS)}, _SPECIALS)
    vocab = byte_vocab(rules, _SPECIALS)
    _save_tokenizer(directory, vocab, context)
    _save_weights(directory, vocab, rules, context, generation)
    return directory


def _save_tokenizer(directory: Path, vocab: dict[str, int], context: int) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(vocab, _SPECIALS),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        model_max_length=context,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _save_weights(directory: Path, vocab: dict[str, int], rules: Rules, context: int, generation: dict | None) -> None:
    ending = {token: [("<|eos|>", 5.0), *rules.get(token, [])] for token in vocab}  # what has no rule ends the text
    bos, eos = vocab["<|bos|>"], vocab["<|eos|>"]
    model = table_model(vocab, ending, max_position_embeddings=context, bos_token_id=bos, eos_token_id=eos)
    model.model.embed_tokens.weight.data[vocab["~"]] = float("nan")
    model.generation_config = GenerationConfig(eos_token_id=eos, **(generation or {}))
    model.save_pretrained(directory)
