import example_diloco
import torch


def test_example_trains_two_workers_to_one_state(capsys):
    threads = torch.get_num_threads()
    try:
        example_diloco.in_process(workers=2, steps=20)
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["round", "1"], ["round", "2"]]
    losses = [float(line.split()[3]) for line in lines[:2]]
    assert losses[1] < losses[0] < 6
    assert lines[2].startswith("state root")
