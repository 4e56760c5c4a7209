"""Text for people: what a process tells them, made safe to show.

A policy's output, or a user's error that quotes it, may hold what a terminal would obey, and may be longer than anyone
reads.
"""

import os
import sys
import traceback
import unicodedata
from typing import Any, TextIO

# Controls that turn the direction of text.
BIDI = {
    0x61C,
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
}
LINES = 40  # of a traceback's frames, and of what its error says
WIDTH = 1000  # characters of a line


def say(text: str) -> None:
    """Print on rank 0 only, at once."""
    if os.environ.get("RANK", "0") == "0":
        put(printable(text))


def put(text: str) -> None:
    """Print a line. Who read them may have gone, as tee does at Ctrl-C: then nobody reads on, and nothing stops."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey.

    Control characters, lone surrogates and direction controls are spelt out, all else stays as it is.
    """
    return "".join(
        c if c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and ord(c) not in BIDI) else f"\\x{ord(c):02x}"
        for c in text.replace("\r\n", "\n")
    )


def one_line(text: object, room: int) -> str:
    """The end of a text, where answers are, on one line of at most `room` columns."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= room else "…" + line[1 - room :]


def traceback_text() -> str:
    """The traceback of the error that is being handled.

    Of many frames, of an error of many lines and of a long line the middle is left out, visibly.
    """
    whole = traceback.format_exc()
    error = "".join(traceback.format_exception_only(sys.exception()))
    if not whole.endswith(error):
        return shortened(whole)
    return shortened(whole.removesuffix(error)) + shortened(error)


def shortened(text: str) -> str:
    """At most LINES lines of about WIDTH characters: the first and the last."""
    lines = [shortened_line(line) for line in text.split("\n")]
    left_out = len(lines) - LINES
    if left_out > 0:
        half = LINES // 2
        lines = [*lines[:half], f"[... {left_out} lines left out ...]", *lines[half + left_out :]]
    return "\n".join(lines)


def shortened_line(line: str) -> str:
    left_out = len(line) - WIDTH
    if left_out <= 0:
        return line
    half = WIDTH // 2
    return f"{line[:half]} [... {left_out} characters left out ...] {line[half + left_out :]}"


class SpeltOut:
    """A stream that writes what is printable: for processes whose print may be of a policy's output."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
