"""Options that several commands share."""

from __future__ import annotations

import click


class ManyInputs(click.Command):
    """Lets one `--input` take several files, as shells expand `--input *.jpg`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        flag = ""
        has_value = False
        for word in args:
            if word.startswith("-") and word != "-":
                flag, has_value = word.partition("=")[0], "=" in word
            elif has_value and flag == "--input":
                spread.append(flag)
            else:
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)
