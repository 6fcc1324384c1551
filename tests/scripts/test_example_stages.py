import example_stages
import torch


def test_example_trains_a_model_in_three_stages(capsys):
    threads = torch.get_num_threads()
    try:
        example_stages.train(stages=3, steps=20, codec="int8")
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["stage 0", "stage 1", "stage 2"]
    losses = [float(line.split()[3]) for line in lines[3:]]
    assert len(losses) == 2 and losses[1] < losses[0] < 6
