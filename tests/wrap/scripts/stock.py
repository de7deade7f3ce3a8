import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)

data = torch.Generator().manual_seed(1)
for _ in range(10):
    x = torch.randn(8, 16, generator=data)
    loss = torch.nn.functional.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.8f}", flush=True)
