"""Settings of the funnel, checked by pydantic; the key of a bad one is named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from .images import Coordinates
from .types import ALL_POOLS, KINDS, Form, Kind, Span
from .wording import BRIEFLY, ENDS, JUDGE, QUESTION, RATE

Share = Annotated[float, Field(ge=0, le=1)]
Confidence = Annotated[float, Field(gt=0, lt=1)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of a million tokens
Count = Annotated[int, Field(ge=1)]
Mode = Literal["funnel", "base", "draft-only", "tools-off", "specreason"]
Pool = Literal["min", "mean", "bottom", "log", "min_logprob"]


class Section(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(Section):
    """One model: replicas by URL, or a folder or hub name that vLLM loads in this process (``vllm``: its options). Prices
    are of a million tokens; with all of them the run's figures are in money, too."""

    model: Annotated[str, Field(min_length=1)]
    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+")], ...] = ()
    api_key: SecretStr | None = None
    concurrency: Count = 32
    timeout: Annotated[float, Field(gt=0)] = 300.0
    total_timeout: Annotated[float, Field(gt=0)] = 900.0
    attempts: Count = 4
    prompt_price: Price | None = None
    output_price: Price | None = None
    vllm: dict[str, Any] = Field(default_factory=dict)

    @property
    def known_as(self) -> str:
        """The model's name in logs and calibrations: ``vllm.served_model_name`` where there is one, so that a folder may
        move; else ``model``."""
        name = self.vllm.get("served_model_name")
        return str((name[0] if isinstance(name, (list, tuple)) else name) or self.model)


class DraftSettings(Section):
    """The small model's answer. ``max_tokens``: 20, or 1,024 when it thinks first."""

    max_tokens: Count | None = None
    thinking: bool = False
    depth: Annotated[int, Field(ge=0, le=8)] = 0
    tools: tuple[str, ...] = ("crop",)
    max_pixels: Count | None = None
    stop: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.max_tokens or (1024 if self.thinking else 20)


class GateSettings(Section):
    """What is scored and from where on a draft is accepted. ``tau`` is a confidence; ``artifact`` replaces it."""

    k: Annotated[int, Field(ge=2, le=256)] = 64
    form: Form = "exclude_top1"
    pool: Pool = "min"
    tau: Confidence = 0.98
    artifact: Path | None = None
    strict: bool = True
    reject_early: bool = False
    span: Span = "output"

    @model_validator(mode="after")
    def _fits(self) -> GateSettings:
        if self.reject_early and self.pool != "min":
            raise ValueError(f"reject_early: expected pool 'min', got {self.pool!r}: only the minimum never rises")
        if self.reject_early and self.span == "answer":
            raise ValueError("reject_early: expected span 'output', got 'answer': the engine sees every token")
        if self.form == "include_top1" and self.pool != "min":
            raise ValueError(
                f"form: expected 'exclude_top1' with pool {self.pool!r}: only min decides alike in both forms"
            )
        return self

    @property
    def pools(self) -> tuple[str, ...]:
        """All, the deciding one first: one run then serves every ablation."""
        return (self.pool, *(p for p in ALL_POOLS if p != self.pool))


class AuditSettings(Section):
    """Share of accepted queries that the loop answers, too; how many at once."""

    share: Share = 0.01
    concurrency: Count = 1


class BreakevenSettings(Section):
    """Pausing where speculation costs more than it saves."""

    enabled: bool = True
    window: Count = 200
    least: Count = 50
    probe_every: Count = 20
    probes: Count = 50
    resume_at: Annotated[float, Field(ge=1)] = 1.05


class WordingSettings(Section):
    """What the models are asked; the defaults are the library's own words. Give a model those that it was trained on.

    Parameters
    ----------
    judge : str
        With ``{question}`` where the question and its options go; no other braces.
    direct : str or mapping of kind to str, optional
        What follows a question that is answered without tools (drafts, too): one text, or one a kind; "" is nothing. Kinds
        without one have the library's.
    system : str, optional
        The loop's system turn instead of the dialect's; "" is none. ``{tools}`` is replaced by the tools' descriptions.
    loop : str, optional
        What follows the loop's question instead of the dialect's text.
    rate : str
        How SpecReason asks for a mark of a step.
    """

    judge: str = JUDGE
    direct: str | dict[Kind, str] | None = None
    system: str | None = None
    loop: str | None = None
    rate: Annotated[str, Field(min_length=1)] = RATE

    @field_validator("judge")
    @classmethod
    def _asks(cls, text: str) -> str:
        if QUESTION not in text:
            raise ValueError(f"expected a text with {QUESTION} in it, got {text!r}")
        if (other := re.search(r"\{[^{}]*\}|[{}]", text.replace(QUESTION, ""))) is not None:
            raise ValueError(f"expected {QUESTION} as the only braces, got {other.group()!r}")
        return text

    @field_validator("direct", mode="before")
    @classmethod
    def _by_kind(cls, given: Any) -> Any:
        # Here and not by the types: their errors would name a key for each branch of the union.
        if not isinstance(given, Mapping):
            if given is None or isinstance(given, str):
                return given
            raise ValueError(f"expected a text, or a mapping of kinds to texts, got {given!r}")
        for kind, text in given.items():
            if kind not in KINDS:
                raise ValueError(f"expected kinds among {', '.join(KINDS)}, got {kind!r}")
            if not isinstance(text, str):
                raise ValueError(f"{kind}: expected a text, got {text!r}")
        return dict(given)

    @field_validator("direct", "loop")
    @classmethod
    def _follows(cls, given: Any) -> Any:
        texts = given.values() if isinstance(given, dict) else (given,)
        if any(QUESTION in text for text in texts if text is not None):
            raise ValueError(f"expected what follows the question, without {QUESTION}: the question stands before it")
        return given

    def ending(self, kind: Kind | None) -> str:
        """What follows a question of this kind that is answered without tools."""
        if isinstance(self.direct, str):
            return self.direct
        own = BRIEFLY if kind is None else ENDS.get(kind, BRIEFLY)
        return own if kind is None or self.direct is None else self.direct.get(kind, own)

    def texts(self) -> dict[str, str | None]:
        """All that can decide about drafts, by key; None: the dialect's own."""
        ends = {f"direct.{kind}": self.ending(kind) for kind in KINDS}
        return {"judge": self.judge, "direct": self.ending(None), **ends, "system": self.system, "loop": self.loop}

    def of_drafts(self, depth: int) -> dict[str, str | None]:
        """Those of :meth:`texts` that do decide: drafts with tools begin as the loop does."""
        looped = ("system", "loop")
        return {key: text for key, text in self.texts().items() if key == "judge" or (key in looped) is (depth > 0)}


class FunnelSettings(Section):
    """How queries are answered; the defaults are the paper's."""

    mode: Mode = "funnel"
    judge: Literal["large", "small", "off"] = "large"
    judge_tokens: Annotated[int, Field(ge=1, le=10)] = 1
    overlap: bool = False
    draft: DraftSettings = DraftSettings()
    gate: GateSettings = GateSettings()
    steps: Count = 5
    answer_tokens: Count = 512
    in_flight: Count = 64
    attempts: Count = 2
    timeout: Annotated[float, Field(gt=0)] | None = None
    barrier: bool = False
    batch_size: Count = 16
    loop_concurrency: Count = 1
    audit: AuditSettings = AuditSettings()
    breakeven: BreakevenSettings = BreakevenSettings()
    seed: int = 0
    kind: Kind | None = None
    wording: WordingSettings = WordingSettings()

    @model_validator(mode="after")
    def _fits(self) -> FunnelSettings:
        if self.overlap and self.judge == "off":
            raise ValueError("overlap: expected a judge to overlap with, got judge 'off'")
        if self.barrier and self.overlap:
            raise ValueError("overlap: expected false with barrier: a batch is judged before it is drafted")
        if self.barrier and self.batch_size > self.in_flight:
            raise ValueError(f"in_flight: expected batch_size ({self.batch_size}) or more, got {self.in_flight}")
        if self.mode == "specreason" and self.barrier:
            raise ValueError("barrier: expected mode 'funnel' or 'base', got 'specreason'")
        return self


class PixelSettings(Section):
    """How the large model's processor resizes pictures. What is None is read from the model's folder where there is one, else it
    is Qwen2.5-VL's."""

    factor: Count | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None


class AgentSettings(Section):
    """The large model's loop. ``coordinates``: what its boxes count. ``max_pixels``: pictures are sent with at most so many;
    ``max_tokens``: of a step; ``tools``: registered names (None: the agent's own in both)."""

    coordinates: Coordinates = "seen"
    max_pixels: Count | None = None
    max_tokens: Count | None = None
    tool_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    tools: tuple[str, ...] | None = None
    pixels: PixelSettings = PixelSettings()


class ServeSettings(Section):
    """The HTTP server of `speceyes serve`. ``queue``: requests that wait beyond ``funnel.in_flight``; more get 429. ``fetch``:
    pictures by https, too, from public addresses. ``otlp_traces``: where spans go."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8100
    model_name: Annotated[str, Field(min_length=1)] = "speceyes"
    api_keys: tuple[SecretStr, ...] = ()
    queue: Annotated[int, Field(ge=0)] = 256
    timeout: Annotated[float, Field(gt=0)] = 900.0
    read_timeout: Annotated[float, Field(gt=0)] = 30.0
    keep_alive: Annotated[float, Field(gt=0)] = 10.0
    drain: Annotated[float, Field(ge=0)] = 60.0
    max_body_bytes: Count = 48 << 20
    max_turns: Count = 256
    max_images: Annotated[int, Field(ge=0)] = 16
    max_image_bytes: Count = 16 << 20
    max_image_pixels: Count = 40_000_000
    fetch: bool = False
    fetch_timeout: Annotated[float, Field(gt=0)] = 10.0
    otlp_traces: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None = None

    @model_validator(mode="after")
    def _fits(self) -> ServeSettings:
        if any(not key.get_secret_value().strip() for key in self.api_keys):
            raise ValueError("api_keys: expected keys that are not empty")
        return self


class SpeceyesSettings(Section):
    """Everything that `speceyes run` and `speceyes serve` need: both engines, the agent and its loop, the funnel, the server."""

    large: EngineSettings
    small: EngineSettings | None = None
    agent: Literal["deepeyes", "thyme", "plain", "direct"] = "deepeyes"
    loop: AgentSettings = AgentSettings()
    funnel: FunnelSettings = FunnelSettings()
    serve: ServeSettings = ServeSettings()
