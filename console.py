"""Text on a terminal: a policy's output, or a user's error that quotes it, may hold what a terminal would obey."""
import unicodedata

BIDI = {0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # controls that turn the direction of text


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters, lone surrogates and direction controls are spelt out, all else stays as it is."""
    return "".join(c if c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and ord(c) not in BIDI) else f"\\x{ord(c):02x}" for c in text.replace("\r\n", "\n"))


def one_line(text, room: int) -> str:
    """The end of a text, where answers are, on one line of at most `room` columns."""
    text = printable(" ".join(str(text).split()))
    return text if len(text) <= room else "…" + text[1 - room :]


class SpeltOut:
    """A stream that writes what is printable: for processes whose print may be of a policy's output."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name):
        return getattr(self.stream, name)
