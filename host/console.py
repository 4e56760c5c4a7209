"""Text for people. A policy's output, or a user's error that quotes it, may hold what a terminal would obey, and may be longer than anyone reads."""

import sys
import traceback
import unicodedata

BIDI = {
    0x61C,
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
}  # controls that turn the direction of text
LINES, WIDTH = 40, 1000  # of a traceback's frames, and of what its error says; characters of a line


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters, lone surrogates and direction controls are spelt out, all else stays as it is."""
    return "".join(
        c if c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and ord(c) not in BIDI) else f"\\x{ord(c):02x}"
        for c in text.replace("\r\n", "\n")
    )


def one_line(text, room: int) -> str:
    """The end of a text, where answers are, on one line of at most `room` columns."""
    text = printable(" ".join(str(text).split()))
    return text if len(text) <= room else "…" + text[1 - room :]


def traceback_text() -> str:
    """The traceback of the error that is being handled. Of many frames, of an error of many lines and of a long line the middle is left out, visibly."""
    whole, error = traceback.format_exc(), "".join(traceback.format_exception_only(sys.exception()))
    return shortened(whole.removesuffix(error)) + shortened(error) if whole.endswith(error) else shortened(whole)


def shortened(text: str) -> str:
    """At most LINES lines of about WIDTH characters: the first and the last."""
    half = WIDTH // 2
    lines = [
        line
        if len(line) <= WIDTH
        else f"{line[:half]} [... {len(line) - WIDTH} characters left out ...] {line[-half:]}"
        for line in text.split("\n")
    ]
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = [f"[... {len(lines) - LINES} lines left out ...]"]
    return "\n".join(lines)


class SpeltOut:
    """A stream that writes what is printable: for processes whose print may be of a policy's output."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name):
        return getattr(self.stream, name)
