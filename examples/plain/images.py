# Image classification: a residual network, SGD with momentum, a rate that falls by epochs, accuracy after each.
#
#     python images.py

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def images(samples):
    labels = torch.randint(10, (samples,))
    return TensorDataset(torch.randn(samples, 3, 16, 16) + labels.view(-1, 1, 1, 1) / 5, labels)


torch.manual_seed(0)
train, test = images(64), images(32)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    Residual(16),
    nn.MaxPool2d(2),
    Residual(16),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
train_loader = DataLoader(train, batch_size=16)
test_loader = DataLoader(test, batch_size=16)

for epoch in range(3):
    model.train()
    for step, (inputs, labels) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} step {step}: loss {loss.item():.8f}")
    scheduler.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in test_loader)
    print(f"epoch {epoch}: {correct} of {len(test)} correct")
