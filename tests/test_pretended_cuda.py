"""The GPU that is not there: it refuses what torch refuses of tensors on two devices, and nothing that torch takes."""

import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from pretended_cuda import CUDA, pretended_cuda
from torch import nn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

REFUSED = {
    "a sum": lambda cpu, cuda: cpu + cuda,
    "in place": lambda cpu, cuda: cuda.add_(cpu),
    "a scalar of cuda": lambda cpu, cuda: cpu * cuda.sum(),
    "a comparison": torch.equal,
    "cat": lambda cpu, cuda: torch.cat([cpu, cuda]),
    "stack of scalars": lambda cpu, cuda: torch.stack([cpu.sum(), cuda.sum()]),
    "where": lambda cpu, cuda: torch.where(cpu > 1, cuda, 0.0),
    "gather": lambda cpu, cuda: cuda.gather(0, cpu.long()),
    "a mask of cuda": lambda cpu, cuda: cpu[cuda > 1],
    "indices of cuda": lambda cpu, cuda: cpu[cuda.long()],
    "values of the CPU": lambda cpu, cuda: cuda.__setitem__(cuda > -1, cpu),
    "values of cuda": lambda cpu, cuda: cpu.__setitem__(cpu > -1, cuda),
    "a CPU generator": lambda cpu, cuda: torch.multinomial(cuda, 1, generator=torch.Generator()),
    "numpy": lambda cpu, cuda: cuda.numpy(),
    "numpy's asarray": lambda cpu, cuda: np.asarray(cuda),
    "a layer elsewhere": lambda cpu, cuda: nn.Linear(3, 2)(cuda),
}


@pytest.mark.parametrize("mix", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused(mix):
    with pretended_cuda():
        cpu, cuda = torch.arange(3.0), torch.arange(3.0, device="cuda")
        with pytest.raises((RuntimeError, TypeError), match="cuda"):
            mix(cpu, cuda)
        mix(cpu, cpu.clone())  # on one device it is taken


TAKEN = {
    "a scalar of the CPU": lambda cpu, cuda: cuda * cpu.sum(),
    "numbers": lambda cpu, cuda: 2 * cuda + 1,
    "a mask of the CPU": lambda cpu, cuda: cuda[cpu > 1],
    "indices of the CPU": lambda cpu, cuda: cuda[cpu.long()],
    "a copy into it": lambda cpu, cuda: cuda.copy_(cpu),
    "moved by a word": lambda cpu, cuda: cpu.to("cuda"),
    "moved by a device": lambda cpu, cuda: cpu.to(cuda.device, torch.int64),
    "moved to another": lambda cpu, cuda: cpu.to(cuda) + cuda,
    "made there": lambda cpu, cuda: torch.ones(3, device=cuda.device) + torch.tensor([1.0, 2.0, 3.0], device="cuda"),
    "made like it": lambda cpu, cuda: torch.zeros_like(cuda) + cuda.new_ones(3),
    "made inside of torch": lambda cpu, cuda: nn.functional.one_hot(cuda.long(), 3),
    "of another dtype": lambda cpu, cuda: cuda.half().float() + cuda,
    "views": lambda cpu, cuda: cuda[None].expand(2, 3).T[1:].flatten(),
}


@pytest.mark.parametrize("use", TAKEN.values(), ids=TAKEN)
def test_what_torch_takes_is_on_the_gpu(use):
    with pretended_cuda():
        assert use(torch.arange(3.0), torch.arange(3.0, device="cuda")).device == CUDA


def test_what_comes_back_is_on_the_cpu():
    with pretended_cuda():
        cuda = torch.arange(3.0, device="cuda")
        for back in (cuda.cpu(), cuda.to("cpu"), cuda.to(torch.ones(1)), cuda.to(device="cpu", dtype=torch.int64)):
            assert back.device.type == "cpu" and back.numpy().tolist() == [0, 1, 2]
        assert cuda.device == CUDA and cuda.tolist() == [0, 1, 2] and cuda.sum().item() == 3


def test_a_module_trains_there_as_on_the_cpu():
    """The same objects as parameters, gradients on their device, and the same numbers; a copy and a way back."""

    def train(device):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        module.to(device)
        for _ in range(2):
            module(torch.ones(2, 3).to(device)).topk(1, 0).values.cpu().square().sum().backward()
            assert {p.grad.device for p in module.parameters()} == {module[0].weight.device}
            optimizer.step()
        return module, optimizer

    with pretended_cuda():
        (module, optimizer), (twin, _) = train("cuda"), train("cpu")
        assert {x.device for state in optimizer.state.values() for x in state.values()} == {CUDA}
        for there, here in zip(copy.deepcopy(module).parameters(), twin.parameters(), strict=True):
            assert there.device == CUDA and isinstance(there, nn.Parameter)
            assert torch.equal(there.detach().cpu(), here.detach())
        next(iter(optimizer.state.values()))["step"] = torch.tensor(2.0)
        with pytest.raises(RuntimeError, match=r"_fused_adamw_.*same device"):
            optimizer.step()
        assert {type(p) for p in module.to("cpu").parameters()} == {nn.Parameter}


def test_outside_nothing_is_left_of_it():
    before = dict(vars(torch.cuda)), Accelerator.device
    with pytest.raises(ZeroDivisionError), pretended_cuda():
        assert Accelerator().device == CUDA
        raise ZeroDivisionError
    assert (dict(vars(torch.cuda)), Accelerator.device) == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")
