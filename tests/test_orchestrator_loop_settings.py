"""The loop's section of the settings: what reaches agent and requests, and how the processor resizes pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import virtual_loop
import yaml
from fake_engine import FakeEngine, Scripted

from speceyes_kernels.orchestrator.agents import Loop, build_agent
from speceyes_kernels.orchestrator.agents.build import pixel_rule
from speceyes_kernels.orchestrator.config import load_settings
from speceyes_kernels.orchestrator.errors import SettingsError
from speceyes_kernels.orchestrator.evaluation.runner import plan
from speceyes_kernels.orchestrator.images import PixelRule
from speceyes_kernels.orchestrator.types import Query

LARGE = {"large.model": "big", "large.urls": ["http://a:1"]}
QUERY = Query("How many {red} cups?", id="q0", options=("one", "two"))


def load(environ=None, **flags):
    return load_settings({**LARGE, **flags}, environ=environ or {}).settings


def test_the_loops_section_reaches_the_agent_and_its_requests():
    flags = {
        "loop.coordinates": "thousandths", "loop.max_pixels": 5000, "loop.max_tokens": 77, "loop.tool_timeout": 2,
        "loop.tools": ["zoom", "calculator"], "loop.pixels": {"factor": 32, "min_pixels": 2048, "max_pixels": 4096},
    }  # fmt: skip
    agent = build_agent(load(**flags))
    assert isinstance(agent, Loop) and agent.coordinates == "thousandths" and agent.tool_timeout == 2
    assert agent.rule == PixelRule(32, 2048, 4096) and [t.name for t in agent.tools] == [
        "image_zoom_in_tool",
        "calculator",
    ]
    engine = FakeEngine([Scripted("<answer>3</answer>")])
    virtual_loop.run(agent.run(QUERY, engine))
    assert (engine.calls[0].request.max_tokens, engine.calls[0].request.max_pixels) == (77, 5000)
    assert build_agent(load(**{"loop.tools": []})).tools == ()
    assert build_agent(load(agent="direct", **flags)) is None
    with pytest.raises(SettingsError, match="loop.tools: 'hammer' is not installed"):
        build_agent(load(**{"loop.tools": ["hammer"]}))
    # From the environment, too; and every run of an evaluation keeps both sections.
    environ = {"SPECEYES_LOOP__MAX_TOKENS": "9", "SPECEYES_FUNNEL__WORDING__DIRECT__NUMBER": "Digits."}
    settings = load(environ, **{"small.model": "little"})
    assert settings.loop.max_tokens == 9 and settings.funnel.wording.ending("number") == "Digits."
    for made in plan(settings, ablations=("judge", "batch")).runs.values():
        assert (made.loop, made.funnel.wording) == (settings.loop, settings.funnel.wording)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("loop.coordinates", "pixels", "loop.coordinates: .*'seen', 'original' or 'thousandths'"),
        ("loop.max_tokens", 0, "loop.max_tokens: "),
        ("loop.tool_timeout", 0, "loop.tool_timeout: "),
        ("loop.pixels.factor", 0, "loop.pixels.factor: "),
    ],
)
def test_errors_name_the_key(key, value, words):
    with pytest.raises(SettingsError, match=words):
        load(**{key: value})


def test_the_example_of_the_docs(tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "orchestrator.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "s.yaml"
    file.write_text(example)
    agent = build_agent(load_settings({}, file=file, environ={}).settings)
    assert agent.rule == PixelRule(32, 65536, 16777216) and agent.coordinates == "thousandths"
    system, user = agent.dialect.first(QUERY, agent.tools)
    given = yaml.safe_load(example)["funnel"]["wording"]
    assert system.text.startswith("You are a helpful assistant.\n\n# Tools") and user.text.endswith(given["loop"])


# ---- the processor's rule --------------------------------------------------------------------------------------------
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip


def _rule(folder, name, config, **pixels):
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    return pixel_rule(load(**{"large.model": str(folder), **{f"loop.pixels.{k}": v for k, v in pixels.items()}}))


def test_the_rule_is_read_from_the_models_folder(tmp_path):
    name = "preprocessor_config.json"
    assert pixel_rule(load()) == pixel_rule(load(**{"large.model": str(tmp_path)})) == PixelRule()
    assert _rule(tmp_path, name, QWEN3) == PixelRule(32, 65536, 16777216)
    assert build_agent(load(**{"large.model": str(tmp_path)})).rule.factor == 32
    # What the settings say goes before it, key by key.
    assert _rule(tmp_path, name, QWEN3, max_pixels=100_000) == PixelRule(32, 65536, 100_000)
    # Processors of other families mean other things by the same keys.
    clip = {"size": {"shortest_edge": 336}, "crop_size": 336, "image_processor_type": "CLIPImageProcessor"}
    assert _rule(tmp_path, name, clip) == PixelRule()
    assert _rule(tmp_path, name, {"size": {"longest_edge": 1024}, "patch_size": {"height": 16}}) == PixelRule()
    # Newer transformers keep it within another file, and read that first.
    assert _rule(tmp_path, "processor_config.json", {"image_processor": QWEN3}).factor == 32
    (tmp_path / name).write_text(
        json.dumps({"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 6272})
    )
    assert _rule(tmp_path, "processor_config.json", {"image_processor": QWEN3}).factor == 32
    assert _rule(tmp_path, "processor_config.json", {"processor_class": "X"}) == PixelRule(28, 3136, 6272)


def test_a_factor_alone_brings_the_limits_along():
    assert pixel_rule(load(**{"loop.pixels.factor": 32})) == PixelRule(32, 4 * 32**2, 16384 * 32**2)
    with pytest.raises(SettingsError, match=r"loop.pixels: .*min_pixels <= max_pixels, got 28, 3136, 100$"):
        pixel_rule(load(**{"loop.pixels.max_pixels": 100}))


@pytest.mark.parametrize(
    "config, words",
    [
        ("{", "cannot be read"),
        ("[]", "expected an object, got list"),
        ({**QWEN3, "patch_size": "16"}, "patch_size: expected a whole number of at least 1, got '16'"),
        ({**QWEN3, "merge_size": 0}, "merge_size: .*got 0"),
        ({**QWEN3, "size": {"shortest_edge": 65536, "longest_edge": -1}}, "size.longest_edge: .*got -1"),
        ({**QWEN3, "size": 224}, "size: expected an object, got 224"),
        ({**QWEN3, "min_pixels": 10}, "min_pixels, max_pixels .or size.: .*got 32, 10, 16777216"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, config, words):
    with pytest.raises(SettingsError, match=f"preprocessor_config.json: {words}"):
        _rule(tmp_path, "preprocessor_config.json", config)
    # With everything said by the settings, nobody reads it.
    given = {"factor": 32, "min_pixels": 65536, "max_pixels": 70000}
    assert _rule(tmp_path, "preprocessor_config.json", config, **given) == PixelRule(32, 65536, 70000)
