"""examples/pygame_scene.py: the owl answers frame by frame, and no frame is the model's."""
import os

import pytest

import warp_embed


@pytest.fixture
def scene(example, monkeypatch):
    for name, value in (("SDL_VIDEODRIVER", "dummy"), ("PYGAME_HIDE_SUPPORT_PROMPT", "1")):
        monkeypatch.setitem(os.environ, name, value)
    pygame = pytest.importorskip("pygame", reason="no pygame: pip install 'warp_embed[pygame]'")
    module = example("pygame_scene")
    pygame.display.init()
    pygame.font.init()
    screen = pygame.display.set_mode((module.WIDTH, module.HEIGHT))
    with warp_embed.Model.open(warp_embed.demo_path(), context=160, threads=1) as model:
        scene = module.Scene(model)
        scene.pygame, scene.screen, scene.module = pygame, screen, module
        yield scene
    pygame.quit()


def ask(scene, text):
    pygame = scene.pygame
    for letter in text:
        scene.handle(pygame.event.Event(pygame.TEXTINPUT, text=letter))
    scene.handle(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_RETURN))


def frames(scene, condition, most=2000):
    for _ in range(most):
        if condition():
            return
        scene.update(1 / scene.module.FPS)
    raise AssertionError("the owl is too slow")


def silent(scene):
    return not scene.speaker.busy and not scene.talking


def test_the_owl_answers_and_remembers(scene, artifacts):
    ask(scene, "My pet is a duck.")
    assert scene.speaker.reading and scene.question == "My pet is a duck." and not scene.typed
    frames(scene, lambda: silent(scene))
    ask(scene, "What is my pet?")
    frames(scene, lambda: scene.said and scene.shown >= 9)
    scene.handle(scene.pygame.event.Event(scene.pygame.TEXTINPUT, text="And its "))
    scene.draw(scene.screen)
    scene.pygame.image.save(scene.screen, artifacts / "pygame_scene.png")
    frames(scene, lambda: silent(scene))
    assert scene.said == "Your pet is a duck."


@pytest.mark.parametrize("n", [1, 5, 25])
def test_interrupting_the_owl_spoils_nothing(scene, n):
    scene.module.BUDGET_S = 1e-6                                # a layer a frame: the interruption is inside a token
    ask(scene, "What is the opposite of hot?")
    for _ in range(n):
        scene.update(1 / 60)
    scene.handle(scene.pygame.event.Event(scene.pygame.KEYDOWN, key=scene.pygame.K_ESCAPE))
    assert silent(scene)
    ask(scene, "What is the capital of France?")
    frames(scene, lambda: silent(scene))
    assert scene.said == "The capital of France is Paris."


def test_a_full_context_is_forgotten_not_an_error(scene):
    for _ in range(12):
        ask(scene, "What is 7 plus 5?")
        frames(scene, lambda: silent(scene))
        assert scene.said == "7 plus 5 is 12."


def test_backspace_and_empty_questions(scene):
    pygame = scene.pygame
    ask(scene, " ")
    assert not scene.speaker.busy
    scene.handle(pygame.event.Event(pygame.TEXTINPUT, text="hi"))
    scene.handle(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_BACKSPACE))
    assert scene.typed == " h"
    scene.draw(scene.screen)


def test_the_program_itself(scene, monkeypatch):
    """Its own loop, for ten frames, the last of which is the end."""
    pygame, module, seen = scene.pygame, scene.module, []

    def draw(scene, screen):
        seen.append(screen.get_size())
        if len(seen) == 10:
            pygame.event.post(pygame.event.Event(pygame.QUIT))
        original(scene, screen)
    original = module.Scene.draw
    monkeypatch.setattr(module.Scene, "draw", draw)
    monkeypatch.setattr("sys.argv", ["pygame_scene.py"])
    module.main()
    assert len(seen) in (10, 11)
