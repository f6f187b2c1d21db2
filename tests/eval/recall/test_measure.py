"""Recall: the questions are what they say, models of known recall get it, nothing depends on the batch."""

from __future__ import annotations

import math
import re

import pytest
import torch
from helpers.fixtures_perplexity import make_folder
from helpers.paths import BASE
from helpers.real_data import DATA, needs_data
from helpers.recall_models import Copier, Guesser
from helpers.tiny_models import build as tiny_model
from helpers.tiny_models import llama
from transformers import AutoTokenizer

from hf_linattn import bypassed, patch_model
from hf_linattn.errors import DataError, OptionError, UnsupportedModelError
from hf_linattn.eval.recall import Row, measure_recall
from hf_linattn.eval.recall.measure import make_row, score
from hf_linattn.eval.recall.tasks import TASKS, build
from hf_linattn.eval.recall.vocabulary import Candidates, Sample, Vocabulary

BYTES = ("passkey", "induction", "mqar")
"""Tasks for a tokenizer without words."""
DEPTHS = (0.0, 0.3, 1.0)
SIZES = {"base": 2048, "bytes": 257}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("tiny"))
    return {"base": AutoTokenizer.from_pretrained(BASE), "bytes": AutoTokenizer.from_pretrained(folder)}


@pytest.fixture(scope="module")
def vocabularies(tokenizers):
    return {name: Vocabulary(tokenizers[name], size) for name, size in SIZES.items()}


def cases():
    return [("base", task) for task in TASKS] + [("bytes", task) for task in BYTES]


def samples(vocabulary, task, length, depth, count=3):
    return [build(task, vocabulary, length, depth, 0, index) for index in range(count)]


class TestSamples:
    @pytest.mark.parametrize(("name", "task"), cases())
    @pytest.mark.parametrize("length", [300, 301, 509])
    def test_exactly_as_long_as_asked(self, vocabularies, name, task, length):
        vocabulary = vocabularies[name]
        for depth in DEPTHS:
            for sample in samples(vocabulary, task, length, depth):
                assert sample.ids.shape == (length,)
                assert sample.ids[: len(vocabulary.start)].tolist() == vocabulary.start
                special = set(vocabulary.tokenizer.all_special_ids)
                assert not special & set(sample.ids[len(vocabulary.start) :].tolist())
                assert sample.answers[-1][1] == length

    def test_bos_is_the_tokenizers(self, tokenizers, vocabularies):
        assert vocabularies["bytes"].start == [256]
        assert Vocabulary(tokenizers["bytes"], 257, "no").start == []
        with_bos = tokenizers["base"]("a")["input_ids"][0] == tokenizers["base"].bos_token_id
        assert bool(vocabularies["base"].start) == with_bos

    @pytest.mark.parametrize(("name", "task"), cases())
    def test_the_thing_lies_where_the_depth_says(self, vocabularies, name, task):
        vocabulary = vocabularies[name]
        low, middle, high = (build(task, vocabulary, 400, depth, 0, 0) for depth in (0.0, 0.5, 1.0))
        assert abs(middle.place - (low.place + high.place) / 2) <= 3  # key_value: no place inside a pair
        if task == "passkey":
            head = vocabulary.tokenizer.decode(low.ids[: low.place], skip_special_tokens=True)
            assert head.endswith("about it.\n")
            assert "grass" not in head
        else:
            assert low.place == len(vocabulary.start)
        if task in ("induction", "mqar"):
            count = 64 if task == "induction" else 32
            assert high.place == 400 - 2 * count

    @pytest.mark.parametrize("name", SIZES)
    def test_passkey_reads_as_text(self, vocabularies, name):
        decode = vocabularies[name].tokenizer.decode
        for sample in samples(vocabularies[name], "passkey", 400, 0.4):
            (start, end), text = sample.answers[0], decode(sample.ids)
            key = decode(sample.ids[start:end]).strip()
            assert re.fullmatch(r"[1-9]\d{4}", key)
            assert text.endswith(f"again.\nWhat is the pass key? The pass key is {key}")
            assert decode(sample.ids[sample.place :]).startswith(
                f"The pass key is {key}. Remember it. {key} is the pass key.\n"
            )
            assert text.count(key) == 3
            assert sample.chance == 1 / 90000
            assert len(sample.candidates.answers) == 10

    def test_key_value_reads_as_a_list(self, vocabularies):
        vocabulary = vocabularies["base"]
        for depth in DEPTHS:
            for sample in samples(vocabulary, "key_value", 301, depth):
                text = vocabulary.tokenizer.decode(sample.ids, skip_special_tokens=True)
                assert vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"] == (
                    sample.ids[len(vocabulary.start) :].tolist()
                )
                *pairs, asked = [part.strip().split(": ") for part in text.split(",")]
                listed = dict(pairs)
                assert len(listed) == len(pairs)  # no key twice
                assert listed[asked[0]] == asked[1]
                assert list(listed).index(asked[0]) == round(depth * (len(pairs) - 1))
                assert sample.chance == pytest.approx(1 / len(set(listed.values())))
                # no longer key ends like the one asked for
                assert sum(key.endswith(asked[0]) for key in listed) == 1

    def test_induction_has_one_answer_each(self, vocabularies):
        for sample in samples(vocabularies["base"], "induction", 600, 0.7):
            ids = sample.ids.tolist()
            assert ids[sample.place : sample.place + 64] == ids[-64:]
            assert len(sample.answers) == 63
            assert all(ids.count(token) == 2 for token in ids[-64:])
            assert sample.chance == 1 / len(vocabularies["base"].tokens)

    def test_mqar_asks_every_pair_once(self, vocabularies):
        for sample in samples(vocabularies["bytes"], "mqar", 300, 0.2):
            ids = sample.ids.tolist()
            block, queries = ids[sample.place : sample.place + 32], ids[-32:]
            pairs = set(zip(block[::2], block[1::2], strict=True))
            assert len(pairs) == 16
            assert set(zip(queries[::2], queries[1::2], strict=True)) == pairs
            assert queries != block
            assert all(ids.count(token) == 2 for token in block)
            assert [start for start, _ in sample.answers] == list(range(300 - 31, 300, 2))

    def test_random_choices_come_from_the_seed(self, vocabularies):
        def ids(task="mqar", length=200, depth=0.5, seed=0, index=0):
            return build(task, vocabularies["bytes"], length, depth, seed, index).ids.tolist()

        assert ids() == ids()
        assert ids() != ids(seed=1)
        assert ids() != ids(index=1)

    @pytest.mark.parametrize(
        ("name", "task", "length", "error", "words"),
        [
            ("bytes", "key_value", 500, DataError, "key_value needs 16 words.*has 0; take mqar"),
            (
                "bytes",
                "passkey",
                100,
                OptionError,
                r"passkey does not fit into 100 tokens: give it at least \d+",
            ),
            ("base", "key_value", 12, OptionError, "key_value does not fit into 12 tokens"),
            ("base", "induction", 7, OptionError, "induction does not fit into 7 tokens"),
            ("base", "mqar", 12, OptionError, "mqar does not fit into 12 tokens"),
        ],
    )
    def test_what_does_not_fit_says_so(self, vocabularies, name, task, length, error, words):
        with pytest.raises(error, match=words):
            build(task, vocabularies[name], length, 0.5, 0, 0)

    def test_the_length_it_asks_for_is_enough(self, vocabularies):
        for name, task in cases():
            with pytest.raises(OptionError) as caught:
                build(task, vocabularies[name], 5, 0.5, 0, 0)
            enough = int(str(caught.value).rsplit(" ", 1)[1])
            assert len(build(task, vocabularies[name], enough, 0.5, 0, 0).ids) == enough


class TestCandidates:
    def test_chance_is_that_of_random_choices_token_by_token(self):
        candidates = Candidates(((1, 2), (1, 3), (4, 2), (5, 5)))
        assert candidates.following(()).tolist() == [1, 4, 5]
        assert candidates.following((1,)).tolist() == [2, 3]
        assert candidates.chance((1, 3)) == pytest.approx(1 / 6)
        assert candidates.chance((5, 5)) == pytest.approx(1 / 3)


class TestKnownModels:
    @pytest.mark.parametrize(("name", "task"), cases())
    def test_a_perfect_copier_finds_everything(self, tokenizers, name, task):
        rows = measure_recall(
            Copier(SIZES[name]), tokenizers[name], (task,), (280,), depths=DEPTHS, samples=2
        )
        assert [row.depth for row in rows] == list(DEPTHS)
        for row in rows:
            assert (row.task, row.length, row.samples) == (task, 280, 2)
            assert (row.accuracy, row.stderr, row.choice) == (1.0, 0.0, 1.0)
            assert row.logprob == pytest.approx(0, abs=1e-6)

    @pytest.mark.parametrize(("name", "task"), cases())
    def test_a_guesser_gets_chance_among_the_candidates(self, tokenizers, name, task):
        count = 20 if task in ("induction", "mqar") else 100  # those have many answers each
        guesser = Guesser(SIZES[name])
        (row,) = measure_recall(guesser, tokenizers[name], (task,), (256,), depths=(0.5,), samples=count)
        error = math.sqrt(row.choice_chance * (1 - row.choice_chance) / row.answers)
        assert abs(row.choice - row.choice_chance) < 3.5 * error
        assert row.accuracy <= row.choice
        assert row.logprob < -5 * (5 if (name, task) == ("bytes", "passkey") else 1)

    def test_a_guesser_who_knows_the_kind_of_answer_gets_chance(self, tokenizers, vocabularies):
        vocabulary = vocabularies["bytes"]
        guesser = Guesser(257, vocabulary.tokens)
        (row,) = measure_recall(
            guesser, tokenizers["bytes"], ("induction",), (256,), depths=(0.0,), samples=60
        )
        assert row.chance == 1 / 256
        assert abs(row.accuracy - row.chance) < 3.5 * math.sqrt(row.chance / row.answers)
        found = samples(vocabularies["base"], "key_value", 128, 0.5, count=1)
        values = [value for (value,) in found[0].candidates.answers]
        asked = make_row("key_value", 128, 0.5, found * 400, score(Guesser(2048, values), found * 400))
        assert asked.chance == pytest.approx(1 / len(values))
        error = math.sqrt(asked.chance / 400)
        assert abs(asked.accuracy - asked.chance) < 3.5 * error

    def test_teacher_forcing_is_greedy_decoding(self):
        model = llama()
        prompt = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(0))
        said = model.generate(prompt, max_new_tokens=4, do_sample=False)[0]
        right = Sample(said, ((20, 24),), None, 0.0)
        for place in range(20, 24):
            other = said.clone()
            other[place] = (other[place] + 1) % 97
            wrong = Sample(other, ((20, 24),), None, 0.0)
            assert [outcome.right for outcome in score(model, [right, wrong])] == [1, 0]


class TestMeasuring:
    def test_a_batch_is_the_same_as_one_by_one(self, tokenizers):
        model = llama(vocab_size=257, max_position_embeddings=512)
        options = {"tasks": BYTES, "lengths": (260, 270), "depths": (0.5,), "samples": 5}
        one, many, default = (
            measure_recall(model, tokenizers["bytes"], **options, batch_size=size) for size in (1, 4, None)
        )
        for rows in (many, default):
            assert [(r.task, r.length, r.depth, r.accuracy, r.choice) for r in rows] == [
                (r.task, r.length, r.depth, r.accuracy, r.choice) for r in one
            ]
            assert [r.logprob for r in rows] == pytest.approx([r.logprob for r in one], abs=1e-9)

    def test_samples_of_several_lengths_keep_their_order(self, vocabularies):
        mixed = [build("mqar", vocabularies["bytes"], n, 0.5, 0, n) for n in (100, 90, 100, 80, 90)]
        model = llama(vocab_size=257)
        assert [o.logprob for o in score(model, mixed)] == pytest.approx(
            [score(model, [each])[0].logprob for each in mixed]
        )

    def test_patched_and_bypassed(self, tokenizers):
        model = llama(vocab_size=257)
        ask = {"tasks": ("induction",), "lengths": (64,), "samples": 3}
        before = measure_recall(model, tokenizers["bytes"], **ask)
        patch_model(model, "elu1")
        patched = measure_recall(model, tokenizers["bytes"], **ask)
        assert [row.logprob for row in patched] != pytest.approx([row.logprob for row in before])
        with bypassed(model):
            assert measure_recall(model, tokenizers["bytes"], **ask) == before

    def test_half_precision_and_the_mode_of_the_model(self, tokenizers):
        model = llama(vocab_size=257, dtype=torch.bfloat16).train()
        (row,) = measure_recall(model, tokenizers["bytes"], lengths=(64,), depths=(0.5,), samples=1)
        assert row.stderr is None
        assert math.isfinite(row.logprob)
        assert model.training

    def test_errors_are_over_samples(self, tokenizers):
        sample = Sample(torch.tensor([5, 6, 5, 6]), ((3, 4),), 0, 0.1)
        wrong = Sample(torch.tensor([5, 6, 5, 7]), ((3, 4),), 0, 0.3)
        read = [sample, wrong, wrong, wrong]
        row = make_row("x", 4, None, read, score(Copier(10), read))
        assert row == Row("x", 4, None, 4, 0.25, pytest.approx(0.25), row.logprob, 0.25, None, None, 4)
        assert row.logprob == pytest.approx(-37.5, abs=1e-3)

    def test_encoders_are_refused(self, tokenizers):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
        bert = tiny_model("BertForMaskedLM", vocab_size=257, pad_token_id=0, **sizes)
        with pytest.raises(UnsupportedModelError, match="sees later tokens"):
            measure_recall(bert, tokenizers["bytes"])
        t5 = tiny_model(
            "T5ForConditionalGeneration", vocab_size=257, d_model=32, d_kv=8, d_ff=32, num_heads=4,
            num_layers=1, implementation="eager",
        )  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="is an encoder-decoder: it answers a text"):
            measure_recall(t5, tokenizers["bytes"])

    def test_a_table_of_positions_that_ends(self, tokenizers):
        gpt2 = tiny_model("GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=257)
        measure_recall(gpt2, tokenizers["bytes"], lengths=(64,), samples=1)
        with pytest.raises(UnsupportedModelError, match="its table ends at 64"):
            measure_recall(gpt2, tokenizers["bytes"], lengths=(65,), samples=1)

    def test_logits_that_are_no_numbers(self, tokenizers):
        model = llama(vocab_size=257)
        with torch.no_grad():
            model.lm_head.weight.fill_(math.nan)
        with pytest.raises(DataError, match="not finite: the weights hold NaN"):
            measure_recall(model, tokenizers["bytes"], lengths=(64,), samples=1)

    def test_a_tokenizer_of_another_model(self, tokenizers):
        with pytest.raises(DataError, match="do not belong together"):
            measure_recall(llama(), tokenizers["bytes"], ("passkey",), (300,))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"tasks": ("needle",)}, "unknown task 'needle'; known: passkey, key_value, induction, mqar"),
            ({"tasks": "mqar"}, "tasks must be a list of names, got 'mqar'"),
            ({"tasks": ()}, "tasks must be a list"),
            ({"lengths": ()}, "lengths"),
            ({"lengths": (0,)}, "lengths"),
            ({"depths": (0.0, 1.5)}, "depths must be numbers from 0"),
            ({"depths": ()}, "depths"),
            ({"samples": 0}, "samples must be at least 1, got 0"),
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ],
    )
    def test_options_are_checked_by_name(self, tokenizers, options, words):
        with pytest.raises(OptionError, match=words):
            measure_recall(llama(vocab_size=257), tokenizers["bytes"], **options)


@needs_data
@pytest.mark.parametrize("name", ["books-1m", "stories260k", "tinystories-656k"])
def test_real_tokenizers(name):
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models" / name)
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    for task in TASKS:
        if task == "key_value" and name == "tinystories-656k":
            with pytest.raises(DataError, match="the tokenizer has 0"):
                build(task, vocabulary, 512, 0.5, 0, 0)
            continue
        (sample,) = samples(vocabulary, task, 512, 0.5, count=1)
        assert len(sample.ids) == 512
        if task == "passkey":
            text = tokenizer.decode(sample.ids)
            key = re.search(r"The pass key is (\d{5})\. Remember it\. \1 is the pass key\.", text)[1]
            assert text.endswith(f"What is the pass key? The pass key is {key}")
            assert tokenizer.decode(sample.ids[sample.answers[0][0] :]).endswith(key)
