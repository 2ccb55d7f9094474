"""Image, detection and video models of torchvision and timm, without weights."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .cases import Architecture, Example

__all__ = ["vision_architectures"]


def vision_architectures() -> Iterator[Architecture]:
    """Yield classification, segmentation, detection and video models."""
    yield from _torchvision()
    yield from _detection()
    yield from _video()
    yield from _timm()


def _image(size: int, batch: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def _torchvision() -> Iterator[Architecture]:
    sizes = {
        "alexnet": 64,
        "vgg11_bn": 32,
        "resnet18": 32,
        "resnet50": 32,
        "resnext50_32x4d": 32,
        "wide_resnet50_2": 32,
        "densenet121": 32,
        "mobilenet_v2": 32,
        "mobilenet_v3_small": 32,
        "efficientnet_b0": 32,
        "efficientnet_v2_s": 32,
        "regnet_y_400mf": 32,
        "convnext_tiny": 32,
        "swin_t": 32,
        "swin_v2_t": 32,
        "shufflenet_v2_x0_5": 32,
        "squeezenet1_0": 64,
        "mnasnet0_5": 32,
    }
    slow = {"efficientnet_v2_s", "wide_resnet50_2", "densenet121", "vgg11_bn"}
    for name, size in sizes.items():
        yield Architecture(
            f"torchvision/{name}",
            partial(_vision, name, size),
            slow=name in slow,
        )
    yield Architecture("torchvision/vit", _small_vit)
    yield Architecture("torchvision/maxvit", _small_maxvit)
    yield Architecture(
        "torchvision/resnet18, training", lambda: _vision("resnet18", 32, train=True)
    )
    yield Architecture(
        "torchvision/inception_v3",
        lambda: _vision("inception_v3", 80, init_weights=False),
        slow=True,
    )
    # The auxiliary heads run in training mode only.
    yield Architecture(
        "torchvision/googlenet, training",
        lambda: _vision("googlenet", 64, train=True, init_weights=False),
    )
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"):
        yield Architecture(
            f"torchvision/{name}",
            partial(_segmentation, name),
            slow=name == "deeplabv3_resnet50",
        )


def _vision(name: str, size: int, train: bool = False, **options: Any) -> Example:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, **options)
    return Example(model.train(train), (_image(size),))


def _small_vit() -> Example:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=10)
    return Example(model.eval(), (_image(32),))


def _small_maxvit() -> Example:
    from torchvision.models import MaxVit

    model = MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.0, num_classes=10)
    return Example(model.eval(), (_image(32),))


def _segmentation(name: str) -> Example:
    from torchvision.models import segmentation

    model = getattr(segmentation, name)(
        weights=None, weights_backbone=None, num_classes=4
    )
    return Example(model.eval(), (_image(64),))


def _detection() -> Iterator[Architecture]:
    names = {
        "fasterrcnn_mobilenet_v3_large_320_fpn": True,
        "ssdlite320_mobilenet_v3_large": True,
        "keypointrcnn_resnet50_fpn": True,
        "retinanet_resnet50_fpn": True,
    }
    for name, slow in names.items():
        yield Architecture(f"torchvision/{name}", partial(_detector, name), slow=slow)


def _detector(name: str) -> Example:
    from torchvision.models import detection

    options: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if not name.startswith("ssd"):
        options |= {"min_size": 64, "max_size": 96, "box_detections_per_img": 3}
    if name.startswith("retinanet"):
        del options["box_detections_per_img"]
        options["detections_per_img"] = 3
    model = getattr(detection, name)(**options)
    return Example(model.eval(), ([torch.rand(3, 64, 80), torch.rand(3, 72, 64)],))


def _video() -> Iterator[Architecture]:
    yield Architecture(
        "torchvision/r3d_18", lambda: _clip("r3d_18", torch.randn(1, 3, 4, 16, 16))
    )
    yield Architecture("torchvision/mvit", _small_mvit)
    yield Architecture(
        "torchvision/swin3d_t",
        lambda: _clip("swin3d_t", torch.randn(1, 3, 4, 32, 32)),
        slow=True,
    )


def _clip(name: str, clip: torch.Tensor) -> Example:
    from torchvision.models import video

    return Example(getattr(video, name)(weights=None).eval(), (clip,))


def _small_mvit() -> Example:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    model = MViT((32, 32), 4, blocks, True, False, True, True, num_classes=5)
    return Example(model.eval(), (torch.randn(1, 3, 4, 32, 32),))


def _timm() -> Iterator[Architecture]:
    for name, size in {
        "resnet10t": 32,
        "mixer_s32_224": 224,
        "xcit_nano_12_p16_224": 224,
        "coat_lite_tiny": 224,
        "pit_ti_224": 224,
        "efficientformer_l1": 224,
        "vit_tiny_patch16_224": 224,
        "eva02_tiny_patch14_224": 224,
        "nfnet_f0": 32,
        "ghostnet_050": 32,
        "levit_128s": 224,
        "poolformer_s12": 32,
    }.items():
        yield Architecture(
            f"timm/{name}",
            partial(_timm_model, name, size),
            slow=name in {"coat_lite_tiny", "xcit_nano_12_p16_224", "nfnet_f0"},
        )


def _timm_model(name: str, size: int) -> Example:
    import timm

    model = timm.create_model(name, pretrained=False)
    return Example(model.eval(), (_image(size, batch=1),))
