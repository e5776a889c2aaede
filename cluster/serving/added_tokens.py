"""The tokens of a checkpoint that are no pieces of text, as a grammar names them. It must not know what they mean."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer

from cluster.serving.grammars import either, quoted, regular


class AddedTokens:
    """The tokens that are no pieces of text, but for those that end texts."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int]) -> None:
        added = {one: token for one, token in tokenizer.get_added_tokens_decoder().items() if one not in end_token_ids}
        self._visible = {one for one, token in added.items() if not token.special}
        self._all = {*added}
        self._ids = {token.content: one for one, token in added.items()}

    def one(self, text: str) -> str | None:
        """A grammar's name of the token of a mark, if there is one."""
        found = self._ids.get(text)
        return None if found is None else f"<[{found}]>"

    def any(self, *, but: str = "", visible: bool = False) -> str | None:
        """A grammar's name of all of them, but that of a mark; those that are `visible` are part of a reply's text."""
        found = (self._visible if visible else self._all) - {self._ids.get(but)}
        return f"<[{','.join(map(str, sorted(found)))}]>" if found else None

    def rules_around_calls(self, opens: str, closes: str, *, is_parallel: bool) -> tuple[str, str, list[str]]:
        """What begins and what ends a `call` between these marks, and the rules of a text that is free around calls. A
        mark may be spelled by tokens that are none, and text goes on behind tokens that are shown: others could hide a
        mark between its parts."""
        shown, first = self.any(but=opens, visible=True), self.one(opens)
        pieces = [*(["call"] if is_parallel else []), *([f"FREE {shown}"] if shown else [])]
        rules = [
            f"start: {f'{either(*pieces)}* ' if pieces else ''}{'FREE' if is_parallel else '(call | FREE)'}",
            f"opens[lazy]: /(.|\\n)*{regular(opens)}/",
            "FREE: /(.|\\n)*/",
        ]
        return either("opens", first and f"FREE {first}"), either(quoted(closes), self.one(closes)), rules
