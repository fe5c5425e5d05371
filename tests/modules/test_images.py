"""Images in prompts: log-probs, gradients and sampled tokens against transformers' full passes."""

from __future__ import annotations

import base64

import pytest
import torch
from PIL import Image

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row, uniform_noise
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.learners.batching import take_rows
from rllib_llm.modules.images import image_columns, image_rows, images_of, read_image
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.reward_model_module import RewardModelModule
from rllib_llm.modules.rl_modules import CausalLMModule, PreferenceModule
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_right
from rllib_llm.shared.errors import Problems
from tests.modules.test_multimodal import FAMILIES, assert_alike, checkpoint, tiny

SEEN = 90  # the image token of all families


def one_image(family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """An image of 2 x 2 tokens as the family's processor would give it."""
    generator = torch.Generator().manual_seed(seed)
    if family.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    pixels = torch.randn(1, 3, 28, 28, generator=generator)
    return {"pixel_values": pixels.unsqueeze(0) if family == "smolvlm" else pixels}


def two_images(family: str) -> dict[str, torch.Tensor]:
    one, other = one_image(family, 1), one_image(family, 2)
    dim = 1 if family == "smolvlm" else 0
    return {name: torch.cat([one[name], other[name]], dim=dim) for name in one}


def prompts(family: str):
    """Left-padded prompts with one image, with two, and without; what they show."""
    ids = [[5, 92, *[SEEN] * 4, 93, 6], [7, 92, *[SEEN] * 4, 93, 8, 92, *[SEEN] * 4, 93, 9], [5, 6]]
    longest = max(map(len, ids))
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids]).bool()
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    return padded, mask, [one_image(family), two_images(family), {}]


def own_logits(model, family: str, token_ids: torch.Tensor, images) -> torch.Tensor:
    """Logits [length, vocab] of a whole text by transformers' own pass."""
    kinds = (token_ids == SEEN).long().unsqueeze(0)
    types = {"gemma3": "token_type_ids", "smolvlm": None}.get(family, "mm_token_type_ids")
    extra = {types: kinds} if types and images else {}
    floats = {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in images.items()}
    return model(input_ids=token_ids.unsqueeze(0), use_cache=False, **floats, **extra).logits[0]


def own_logprobs(model, family, ids, mask, shown, completion_ids) -> torch.Tensor:
    """Log-probs [rows, completion_len], a row at a time."""
    rows = []
    for prompt, real, images, completion in zip(ids, mask, shown, completion_ids, strict=True):
        text = torch.cat([prompt[real], completion])
        logits = own_logits(model, family, text, images)[-len(completion) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def test_columns_keep_what_each_row_shows():
    rows = [one_image("smolvlm"), {}, two_images("smolvlm")]
    batch = image_columns(rows)
    assert batch[columns.IMAGE_ROW].tolist() == [0, -1, 1]
    for row, again in zip(rows, image_rows(batch), strict=True):
        assert row.keys() == again.keys()
        assert all(torch.equal(row[name], again[name]) for name in row)
    assert batch["image/pixel_values"].shape == (2, 1, 2, 3, 28, 28)
    assert image_rows({}) == [] and image_columns([{}, {}]) == {} and images_of({}) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(family):
    model = tiny(family).double()
    ids, mask, shown = prompts(family)
    completion = torch.randint(3, 60, (3, 5), generator=torch.Generator().manual_seed(3))
    weights = torch.randn(3, 5, dtype=torch.float64)

    seen = images_of(image_columns(shown))
    all_true = torch.ones_like(completion, dtype=torch.bool)
    gradients = assert_alike(
        model, weights, own_logprobs(model, family, ids, mask, shown, completion),
        score_completions(model, ids, mask, completion, all_true, shown=seen).logprobs,
    )  # fmt: skip
    assert any("vision" in name or "visual" in name for name in gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_changes_what_is_said(family):
    model = tiny(family)
    ids, mask, shown = prompts(family)
    one, other = (own_logits(model, family, ids[0][mask[0]], one_image(family, s)) for s in (0, 1))
    assert (one[-1] - other[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_sampled_with_transformers_log_probs(family):
    model = tiny(family)
    ids, mask, shown = prompts(family)
    params = SamplingParams(pad_token_id=0, max_new_tokens=6)
    out = generate(
        model, ids, mask, params, num_completions=2, images=shown,
        noise=uniform_noise(4, range(6), 6),
    )  # fmt: skip
    rows = (each.repeat_interleave(2, 0) for each in (ids, mask))
    shown = [images for images in shown for _ in range(2)]
    # transformers' own pass would take these for further images.
    whole = ~(out.completion_ids == SEEN).any(dim=1)
    assert out.completion_mask.all() and whole.sum() >= 4
    parts = ([row for row, kept in zip(each, whole, strict=True) if kept]
             for each in (*rows, shown, out.completion_ids))  # fmt: skip
    with torch.no_grad():
        expected = own_logprobs(model, family, *parts)
    torch.testing.assert_close(out.logprobs[whole], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_token_that_is_said_is_text(family):
    model = tiny(family)
    ids, mask, shown = prompts(family)
    params = SamplingParams(pad_token_id=0, max_new_tokens=6)
    out = generate(
        model, ids, mask, params, num_completions=40, images=shown,
        noise=uniform_noise(1, range(120), 6),
    )  # fmt: skip
    assert (out.completion_ids[:, :-1] == SEEN).any()  # others are read after it
    rows = [each.repeat_interleave(40, 0) for each in (ids, mask)]
    seen = images_of(image_columns([images for images in shown for _ in range(40)]))
    with torch.no_grad():
        scored = score_completions(
            model, *rows, out.completion_ids, out.completion_mask, shown=seen
        )
    # The decode loop reads them as text; a rounding or two apart.
    torch.testing.assert_close(scored.logprobs, out.logprobs, rtol=1e-5, atol=2e-5)


def in_rows(engine, given, params, held=None):
    """Rows 0 .. 5 of an engine, two for each prompt; `held`: what was sampled of each before."""
    ids, mask, shown = given
    held = held or [[]] * 6
    engine.add([
        Row(i, [*ids[i // 2][mask[i // 2]].tolist(), *held[i]], params, num_sampled=len(held[i]),
            noise=Noise(4, i), group=i // 2, images=shown[i // 2])
        for i in range(6)
    ])  # fmt: skip


def finished(engine):
    ended = {}
    while engine.num_running:
        ended |= {each.id: each for each in engine.step()}
    return [ended[i].token_ids for i in range(6)], [ended[i].logprobs for i in range(6)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_stream_sample_as_a_batch_does(family):
    """In one go, continued in another engine, and computed again for new weights."""
    model, given = tiny(family).double(), prompts(family)
    params = SamplingParams(pad_token_id=0, max_new_tokens=6)
    out = generate(
        model, *given[:2], params, num_completions=2, images=given[2],
        noise=uniform_noise(4, range(6), 6),
    )  # fmt: skip
    whole = out.completion_ids.tolist()
    engine = TorchEngine(model, version=0)
    in_rows(engine, given, params)
    tokens, logprobs = finished(engine)
    assert tokens == whole
    torch.testing.assert_close(torch.tensor(logprobs), out.logprobs, rtol=1e-5, atol=1e-5)
    in_rows(engine, given, params)
    for _ in range(3):
        engine.step()
    held = [each.token_ids for each in engine.sampled(range(6), [0] * 6)]
    engine.load(model.state_dict(), 1, "recompute")
    assert finished(engine)[0] == whole
    assert all(len(each) == 3 for each in held)
    in_rows(engine, given, params, held)
    tokens, logprobs = finished(engine)
    assert [[*a, *b] for a, b in zip(held, tokens, strict=True)] == whole
    torch.testing.assert_close(torch.tensor(logprobs), out.logprobs[:, 3:], rtol=1e-5, atol=1e-5)
    # A token of an image that was sampled before shows nothing.
    in_rows(engine, given, params, [[SEEN, 7]] * 6)
    tokens, logprobs = finished(engine)
    said = torch.tensor([[SEEN, 7, *row] for row in tokens])
    rows = [each.repeat_interleave(2, 0) for each in given[:2]]
    seen = images_of(image_columns([images for images in given[2] for _ in range(2)]))
    with torch.no_grad():
        scored = score_completions(model, *rows, said, said >= 0, shown=seen)
    expected = scored.logprobs[:, 2:].float()
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-5, atol=1e-5)
    engine.close()


def module(folder, kind=CausalLMModule, **settings):
    return kind(model_config={
        "pretrained_model": str(folder), "dtype": "float32", "temperature": 1.0, "critic": "none",
        **settings,
    })  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_samples_and_scores_prompts_with_images(family, tmp_path):
    policy = module(checkpoint(tmp_path, family), critic="shared")
    ids, mask, shown = prompts(family)
    batch = {columns.PROMPT_IDS: ids, columns.PROMPT_MASK: mask, **image_columns(shown)}
    out = policy.forward_exploration(
        batch, generate=generate, params=SamplingParams(pad_token_id=0, max_new_tokens=4),
        noise=uniform_noise(1, range(3), 4),
    )  # fmt: skip
    scored = policy.forward_train({**batch, **out})
    torch.testing.assert_close(
        scored[columns.LOGPROBS].detach(), out[columns.SAMPLER_LOGPROBS], rtol=1e-5, atol=2e-5
    )
    torch.testing.assert_close(
        policy.compute_values({**batch, **out}), scored[columns.VALUES], rtol=1e-5, atol=1e-5
    )


def pairs(family):
    ids, mask, shown = prompts(family)
    answers = torch.tensor([[10, 11], [12, 13], [14, 15]]), torch.tensor([[16], [17], [18]])
    batch = {columns.PROMPT_IDS: ids, columns.PROMPT_MASK: mask, **image_columns(shown)}
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        real = torch.ones_like(answer).bool()
        batch |= {f"{name}_ids": answer, f"{name}_mask": real, f"{name}_loss_mask": real}
    return batch, (ids, mask, shown), answers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_pairs_is_that_of_transformers_log_probs(family, tmp_path):
    folder = checkpoint(tmp_path, family)
    policy = module(folder, PreferenceModule, train_vision=True).double()
    batch, given, answers = pairs(family)
    reference = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)

    def losses(chosen, rejected):
        """DPO's, equation 7 of Rafailov et al. 2023, beta 0.5."""
        return -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected - reference))

    own = [own_logprobs(policy.model, family, *given, answer).sum(dim=1) for answer in answers]
    found = policy.forward_train(batch)
    ours = (found[columns.CHOSEN_LOGPROBS], found[columns.REJECTED_LOGPROBS])
    ones = torch.ones(3, dtype=torch.float64)
    gradients = assert_alike(policy.model, ones, losses(*own), losses(*ours))
    assert any("vision" in name or "visual" in name for name in gradients)


def test_scores_and_their_gradients_are_those_of_transformers(tmp_path):
    folder = checkpoint(tmp_path, "gemma3")
    scorer = module(folder, RewardModelModule, seed=0, train_vision=True).double()
    with torch.no_grad():
        scorer.model.score.weight.normal_()
    _, (ids, mask, shown), answers = pairs("gemma3")
    asked = [row[real] for row, real in zip(ids, mask, strict=True)]
    texts = [[torch.cat(both) for both in zip(asked, side, strict=True)] for side in answers]
    batch = image_columns(shown)
    for name, side in zip(("chosen", "rejected"), texts, strict=True):
        padded, real = pad_right([text.tolist() for text in side], 0)
        batch |= {f"{name}_ids": padded, f"{name}_mask": real}
    own = []
    for text, images in zip([*texts[0], *texts[1]], shown * 2, strict=True):
        floats = {name: tensor.double() for name, tensor in images.items()}
        kinds = {"token_type_ids": (text == SEEN).long().unsqueeze(0)} if images else {}
        states = scorer.model.model(text.unsqueeze(0), **floats, **kinds).last_hidden_state[0, -1]
        own.append(scorer.model.score(states).squeeze())
    weights = torch.randn(6, dtype=torch.float64)
    ours = scorer.forward_train(batch)[columns.SCORES].double()
    assert_alike(scorer.model, weights, torch.stack(own), ours)


def images_read(model):
    """Counts the images that a Gemma 3 tower is given from now on."""
    counts = []
    model.model.vision_tower.register_forward_pre_hook(
        lambda _, args, kwargs: counts.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    return counts


@pytest.mark.parametrize("train_vision", [False, True])
def test_a_tower_reads_each_prompt_once(train_vision, tmp_path):
    """Once in a batch where it is frozen, else once in a pass; and it makes no difference."""
    folder = checkpoint(tmp_path, "gemma3")
    policy = module(folder, train_vision=train_vision).double()
    ids, mask, shown = prompts("gemma3")
    once = image_columns(shown)
    completion = torch.randint(3, 60, (12, 5), generator=torch.Generator().manual_seed(3))
    batch = {
        columns.PROMPT_IDS: ids.repeat_interleave(4, 0),
        columns.PROMPT_MASK: mask.repeat_interleave(4, 0),
        columns.COMPLETION_IDS: completion, columns.COMPLETION_MASK: completion >= 0,
        **once, columns.IMAGE_ROW: once[columns.IMAGE_ROW].repeat_interleave(4),
    }  # fmt: skip
    counts = images_read(policy.model)
    whole = policy.forward_train(batch)[columns.LOGPROBS]
    assert counts == [3]  # of two prompts, which are those of eight rows
    order = torch.tensor([11, 0, 5, 3, 8, 7, 1, 2, 4, 6, 9, 10])
    parts = [policy.forward_train(take_rows(batch, rows))[columns.LOGPROBS]
             for rows in order.split(4)]  # fmt: skip
    assert len(counts) == 4 if train_vision else counts == [3]
    torch.testing.assert_close(torch.cat(parts), whole[order], rtol=1e-9, atol=1e-9)
    alone = image_columns([images for images in shown for _ in range(4)])
    torch.testing.assert_close(policy.forward_train({**batch, **alone})[columns.LOGPROBS], whole)


def test_images_are_read_from_files_bytes_data_urls_and_pil(tmp_path):
    image = Image.new("RGB", (4, 3), (10, 20, 30))
    image.save(tmp_path / "image.png")
    content = (tmp_path / "image.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    undecoded = {"bytes": content, "path": None}
    for given in (image, tmp_path / "image.png", content, url, undecoded):
        assert read_image(given).tobytes() == image.tobytes()


@pytest.mark.parametrize(
    "given", [None, 3, b"no image", "data:image/png;base64,####", "https://example.com/x.png"]
)
def test_what_is_no_image_is_refused(given):
    with pytest.raises(Problems) as error:
        read_image(given)
    assert error.value.problem.name == "image"
