"""Chat templates: turns to ids, for prompts and for training. A template is text around the turns, plus control ids.

Llama-2-chat, Vicuna v1.1, Zephyr (TinyLlama-Chat), ChatML (SmolLM2), and none: the text itself. Written out here rather
than read from a folder's chat_template, which is a Jinja program; `auto` only recognises which of them that is.

Every segment is tokenised on its own. LLaMA's tokenizer puts a space in front of each text, so also of one behind a
control id (`</s>USER:` has the ids of `</s> USER:`): the models were trained that way. Behind plain text it must not.
"""
import re
from pathlib import Path

from model import Tokenizer, read_json

CHATS = ("auto", "llama2", "vicuna", "zephyr", "chatml", "none")
SYSTEMS = {
    "chatml": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. "
              "The assistant gives helpful, detailed, and polite answers to the user's questions.",
}
MARKERS = {"[INST]": "llama2", "<|im_start|>": "chatml", "<|user|>": "zephyr", "USER:": "vicuna"}
NAMES = {r"tinyllama.*chat|zephyr": "zephyr", r"vicuna": "vicuna", r"llama[-_]?2.*chat": "llama2"}


# -- which template ----------------------------------------------------------------------------------------------------

def choose_chat(name: str, tok: Tokenizer, folder=None) -> str:
    """auto: what the folder's chat_template looks like, else its name, else the tokenizer's control tokens."""
    if name not in CHATS:
        raise ValueError(f"unknown chat template {name!r}; choose one of {', '.join(CHATS)}")
    if name == "auto":
        guesses = [*guess_chats(Path(folder)), "chatml"] if folder is not None else ["chatml"]
        return next((guess for guess in guesses if not lacking(guess, tok)), "none")
    if lacking(name, tok):
        raise ValueError(f"the {name} template needs {lacking(name, tok)}, which this tokenizer lacks; use --chat none")
    return name


def guess_chats(folder: Path) -> list[str]:
    """From the text of its chat_template, then from its name; a template that holds no marker we know gives nothing."""
    config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    text = str(read_json(config).get("chat_template") or "") if config.is_file() else ""
    text += file.read_text("utf-8") if file.is_file() else ""
    by_text = [chat for marker, chat in MARKERS.items() if marker in text][:1]
    return by_text + [chat for pattern, chat in NAMES.items() if re.search(pattern, folder.resolve().name.lower())]


def lacking(chat: str, tok: Tokenizer) -> str:
    """The control tokens that a template needs and the tokenizer does not have."""
    if chat == "chatml":
        return "" if {"<|im_start|>", "<|im_end|>"} <= tok.special.keys() else "<|im_start|>"
    return "" if chat == "none" or eos_of(tok) else "an end-of-text token"


# -- turns to ids ------------------------------------------------------------------------------------------------------

def chat_segments(tok: Tokenizer, chat: str, turns: list[str], system: str | None = None) -> list[tuple[list, bool]]:
    """Turns (user, assistant, user, ...) -> [(ids, is_answer)], each tokenised on its own: labels need no offsets.

    An answer's segment ends with its end-of-turn id. After the last user turn comes what makes the model answer, so the
    ids of all segments together are the prompt. Control ids are inserted here, by id: user text cannot forge one.
    system None: the template's own.
    """
    system, segments = SYSTEMS.get(chat, "") if system is None else system, []
    for i, text in enumerate(turns):
        ids = ANSWERS[chat](tok, text) if i % 2 else USERS[chat](tok, text, i == 0, system)
        segments.append((ids, i % 2 == 1))
    if chat == "chatml":                                    # its system turn is a segment of its own
        segments.insert(0, (chatml_system(tok, system), False))
    return segments


def chat_prompt(tok: Tokenizer, chat: str, turns: list[str], system: str | None = None) -> list[int]:
    """The ids after which the model answers the last turn."""
    return [i for ids, _ in chat_segments(tok, chat, turns, system) for i in ids]


def next_turn(tok: Tokenizer, chat: str, text: str, last: int) -> list[int]:
    """The ids of a further user turn behind an answer whose last id is given: an answer cut short is ended first."""
    end = [] if chat == "none" else ANSWERS[chat](tok, "")
    return ([] if end[-1:] == [last] else end) + USERS[chat](tok, text, False, "")


def eos_of(tok: Tokenizer) -> list[int]:
    """The id behind an answer, as a list: </s>, else the model's own end; none if there is neither."""
    return [tok.special["</s>"]] if "</s>" in tok.special else sorted(tok.eos_ids)[:1]


def spaces_itself(tok: Tokenizer) -> bool:
    """Does the tokenizer put a space in front of every text (sentencepiece does)?"""
    return tok.encode("a b", bos=False) == tok.encode("a", bos=False) + tok.encode("b", bos=False)


def within(tok: Tokenizer, text: str) -> list[int]:
    """The ids of a text that follows plain text: without the tokenizer's space in front."""
    if not spaces_itself(tok):
        return tok.encode(text, bos=False)
    return tok.encode("\n" + text, bos=False)[len(tok.encode("\n", bos=False)):]            # \n merges with nothing


def spaced(tok: Tokenizer, text: str) -> list[int]:
    """The ids of " " + text that follows plain text."""
    return tok.encode(text if spaces_itself(tok) else " " + text, bos=False)


def none_user(tok, text, first, system):
    return tok.encode(text, bos=first)


def chatml_system(tok, system):
    return [tok.special["<|im_start|>"], *tok.encode("system\n" + system, bos=False), tok.special["<|im_end|>"]]


def chatml_user(tok, text, first, system):
    start, end, line = tok.special["<|im_start|>"], tok.special["<|im_end|>"], tok.encode("\n", bos=False)
    user = [start, *tok.encode("user\n" + text, bos=False), end, *line]
    return line + user + [start, *tok.encode("assistant\n", bos=False)]


def llama2_user(tok, text, first, system):
    """Every pair of turns begins with its own <s>."""
    text = f"<<SYS>>\n{system}\n<</SYS>>\n\n{text}" if first and system else text
    bos = [] if tok.bos_id is None else [tok.bos_id]
    return bos + tok.encode(f"[INST] {text} [/INST]", bos=False)


def llama2_answer(tok, text):
    """A space stands behind the text too, and only that one if there is no text."""
    return (spaced(tok, text + " ") if text else within(tok, " ")) + eos_of(tok)


def vicuna_user(tok, text, first, system):
    """No space behind the last colon: it would become a token of its own, which the model never saw there."""
    text = f"USER: {text} ASSISTANT:"
    return tok.encode(f"{system} {text}" if first and system else text, bos=first)


def zephyr_user(tok, text, first, system):
    eos, opening = eos_of(tok), []
    if first and system:
        opening = tok.encode(f"<|system|>\n{system}") + eos
    user = tok.encode(("\n" if opening or not first else "") + f"<|user|>\n{text}", bos=first and not opening)
    return opening + user + eos + tok.encode("\n<|assistant|>\n", bos=False)


USERS = {"none": none_user, "chatml": chatml_user, "llama2": llama2_user, "vicuna": vicuna_user, "zephyr": zephyr_user}
ANSWERS = {
    "none": lambda tok, text: tok.encode(text, bos=False) + sorted(tok.eos_ids)[:1],
    "chatml": lambda tok, text: tok.encode(text, bos=False) + [tok.special["<|im_end|>"]],
    "llama2": llama2_answer,
    "vicuna": lambda tok, text: spaced(tok, text) + eos_of(tok),
    "zephyr": lambda tok, text: within(tok, text) + eos_of(tok),
}
