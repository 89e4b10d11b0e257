"""Numbers as people read them: losses, rates, counts, bytes, durations."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def significant(value: float | None, digits: int = 4) -> str:
    """``value`` with so many significant digits, trailing zeros kept: 1.2 → ``1.200``; None and NaN as words."""
    if value is None:
        return "non-finite"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    exponent = int(power)  # after rounding: 9.9996 is 10.00
    if not -4 <= exponent < 6:
        return f"{mantissa}e{exponent}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def rate(value: float) -> str:
    """A learning rate: ``2.00e-4``."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}" if value else "0"


def count(value: float) -> str:
    """A number of things or things per second, with thousands separators: ``12,345``."""
    return f"{value:,.0f}"


def short_count(value: float) -> str:
    """A big number in three digits: ``2.94 M``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{significant(value / limit, 3)} {unit}"
    return count(value)


def size(number: float) -> str:
    """Bytes in powers of 1,024, as the plan gives them: ``1.50 GiB``."""
    value, unit = float(number), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{significant(value, 3)} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds as ``340 ms``, ``8.2 s``, ``3 min 20 s``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, 60, "min", 1, "s")
    if whole < 86400:
        return _two(whole, 3600, "h", 60, "min")
    return _two(whole, 86400, "d", 3600, "h")


def _two(whole: int, big: int, big_name: str, small: int, small_name: str) -> str:
    rest = whole % big // small
    return f"{whole // big} {big_name}" + (f" {rest} {small_name}" if rest else "")


def clock(seconds: float) -> str:
    """Seconds as ``0:42``, ``3:20`` or ``2:05:00``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
