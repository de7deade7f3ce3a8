# Fine-tuning a classifier of sequences, as with transformers: batches are dictionaries, the model returns its loss.
#
#     torchrun --standalone --nproc-per-node=2 finetune.py CHECKPOINT

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import repro

checkpoint = sys.argv[1]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    def __init__(self, vocab=20, width=32, labels=2):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, labels)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.encoder(self.embeddings(input_ids), src_key_padding_mask=~attention_mask)
        logits = self.classifier(hidden[:, 0])
        return Output(nn.functional.cross_entropy(logits, labels), logits)


def tokenized(samples, length=16):
    ids = torch.randint(20, (samples, length))
    mask = torch.arange(length) < torch.randint(4, length, (samples, 1))
    labels = (ids[:, 0] < 10).long()
    return [
        {"input_ids": i, "attention_mask": m, "labels": n} for i, m, n in zip(ids, mask, labels, strict=True)
    ]


torch.manual_seed(42)
dataset = tokenized(64)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
model, optimizer = repro.parallelize(model, optimizer, repro.Layout(dp=2, zero=2))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))
warmup, total = 4, 2 * len(loader)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, (total - step) / (total - warmup))
)

model.train()
for epoch in range(2):
    for step, batch in enumerate(loader):
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"epoch {epoch} step {step}: loss {outputs.loss.item():.8f}")

if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), checkpoint)
