"""Finding the answer in a text, and numbers in the answer.

In: responses and reference answers. Out: the part that counts, and exact numbers. Every function takes time
linear in the text.
"""

import re
from fractions import Fraction

BOX = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)"
_POWER = r"(?:[eE][+-]?\d{1,3}(?!\d)|\s*[\u00d7x*]\s*10\s*\^\s*\{?\s*[+-]?\d{1,3}\s*\}?)"
_SIGN = r"(?:(?<![A-Za-z0-9_)\]}])[+-])?"
NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:"
    rf"\\frac\s*\{{\s*(?P<top>[+-]?{_UNSIGNED})\s*\}}\s*\{{\s*(?P<bottom>[+-]?{_UNSIGNED})\s*\}}"
    r"|\\frac\s*(?P<top_digit>\d)\s*(?P<bottom_digit>\d)"
    rf"|(?<![A-Za-z0-9_])(?<!\d\.)(?P<value>{_UNSIGNED})(?P<power>{_POWER})?(?:\s*/\s*(?P<over>{_UNSIGNED}))?"
    r")(?P<percent>\s*%)?"
)
SPELLINGS = (
    (re.compile("\u2212"), "-"),
    (re.compile(r"\{,\}|(?<=\d)\\,(?=\d{3})"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "\u00d7"),
)
MAX_DIGITS = 4000  # Python refuses to turn longer texts into integers
RELATIVE_TOLERANCE = Fraction(1, 10**9)


def captured(pattern: re.Pattern[str], response: str) -> str | None:
    """The first group of the pattern's last match, stripped; None where it does not match."""
    last = None
    for match in pattern.finditer(response):
        last = match
    if last is None or last[1] is None:
        return None
    return str(last[1]).strip()


def reference(answer: str) -> str:
    """What counts in a reference answer: the text after the last `####` (as GSM8K marks it), else the last
    box, else all of it."""
    _, mark, tail = answer.rpartition("####")
    if mark:
        return tail.strip()
    boxed = last_boxed(answer)
    return answer.strip() if boxed is None else boxed


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, of nested ones the inner; None where there
    is none."""
    open_braces: list[int | None] = []
    content, last_start = None, -1
    for match in BOX.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and start > last_start:
                content, last_start = text[start : match.start()].strip(), start
        elif token.endswith("{") and len(token) != 2:
            open_braces.append(match.end() if len(token) > 1 else None)
    return content


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly: 1,000; 42.0; -3; 1.5e3; 2 x 10^{3}; 3/4; \\frac{3}{4}; 50%."""
    for wrong, right in SPELLINGS:
        text = wrong.sub(right, text)
    last = None
    for match in NUMBER.finditer(text):
        found = _value(match)
        last = found if found is not None else last
    return last


def same_number(a: Fraction, b: Fraction) -> bool:
    """Equal; where one of them is not whole, equal within a relative 1e-9 (floats written out)."""
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b))


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of one match; None for a division by zero and for numbers of absurd length."""
    if len(match.group()) > MAX_DIGITS:
        return None
    top = match["top"] or match["top_digit"] or match["value"]
    bottom = match["bottom"] or match["bottom_digit"] or match["over"] or "1"
    numerator, denominator = (Fraction(part.replace(",", "")) for part in (top, bottom))
    if denominator == 0:
        return None
    value = numerator / denominator
    if match["power"]:
        value *= Fraction(10) ** int(re.findall(r"[+-]?\d+", match["power"])[-1])
    if match["percent"]:
        value /= 100
    return -value if match["sign"] == "-" else value
