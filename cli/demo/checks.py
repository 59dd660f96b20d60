"""What must hold, each by name, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass, field

from cli.terminal import out


@dataclass(frozen=True)
class Check:
    name: str
    held: bool
    detail: str


@dataclass
class Checks:
    """Collects; prints each as it is made; `all_held` decides the exit code."""

    made: list[Check] = field(default_factory=list)

    def that(self, name: str, held: bool, detail: object = "") -> None:
        check = Check(name, bool(held), str(detail))
        self.made.append(check)
        out.print(line(check), markup=False)

    @property
    def all_held(self) -> bool:
        return bool(self.made) and all(check.held for check in self.made)

    def as_data(self) -> list[dict[str, object]]:
        return [{"name": check.name, "held": check.held, "detail": check.detail} for check in self.made]


def line(check: Check) -> str:
    return f"  {'✓' if check.held else '✗'} {check.name}" + (f" ({check.detail})" if check.detail else "")
