"""A game whose character talks: an owl by a fire answers while the loop holds 60 frames per second.

    python examples/pygame_scene.py [MODEL]

Every frame lends the model four milliseconds; it works for that long and goes on in the next frame, inside a token if
need be. No thread, no queue. Type a question, press Return; Escape interrupts the owl. The graph shows the last two
seconds: how long each frame worked, the model's part in gold, and the line that no frame may cross.
"""
import argparse
import math
import random
import sys
import time
from collections import deque

import pygame

import warp_embed
from warp_embed import Model, WarpError

WIDTH, HEIGHT, FPS = 960, 540, 60
BUDGET_S = 0.004                                # of a frame's 16.7 ms
LETTERS_PER_S = 32                              # how fast an owl talks
SKY, HORIZON, HILL, GROUND = (13, 17, 43), (64, 52, 96), (27, 27, 56), (17, 18, 36)
PAPER, INK, FAINT = (250, 246, 235), (46, 42, 60), (150, 146, 170)
GOLD, BROWN, DARK = (255, 196, 87), (133, 94, 66), (88, 60, 44)
FIRE, MOON = (452, 440), (610, 95)
OWL = (150, 210)                                # where its picture goes
HINTS = ("What is the opposite of dark?", "What sound does a cow make?", "What is the capital of Peru?",
         "What is 8 plus 9?", "My name is Susan.", "What is my name?")


class Speaker:
    """A conversation that is worked on a few milliseconds at a time."""

    def __init__(self, model):
        self.chat = model.chat()
        self.busy = self.reading = False

    def ask(self, text):
        self.chat.ask(text, max_tokens=64, budget_s=BUDGET_S, overflow="drop_oldest")   # it is an owl: it forgets
        self.busy = self.reading = True

    def stop(self):
        """Leave the rest unsaid."""
        self.chat.cancel()
        self.busy = self.reading = False

    def work(self):
        """Read or say something for a few milliseconds; gives the text that was said."""
        text = self.chat.poll() if self.busy else None
        self.busy = text is not None
        self.reading = self.reading and text == ""
        return text or ""


def backdrop():
    """Sky, moon, hills and trees, drawn once at double size for smooth edges."""
    big, rng = pygame.Surface((2 * WIDTH, 2 * HEIGHT)), random.Random(4)
    for y in range(2 * HEIGHT):
        t = (y / (2 * HEIGHT)) ** 1.6
        pygame.draw.line(big, [a + (b - a) * t for a, b in zip(SKY, HORIZON, strict=True)], (0, y), (2 * WIDTH, y))
    for radius in range(190, 90, -4):                   # the moon's halo
        halo = pygame.Surface((400, 400), pygame.SRCALPHA)
        pygame.draw.circle(halo, (235, 230, 200, 3), (200, 200), radius)
        big.blit(halo, (1020, -10))
    pygame.draw.circle(big, (240, 234, 206), (1220, 190), 84)
    for x, y, r in ((1195, 165, 18), (1250, 210, 12), (1220, 232, 8), (1246, 154, 9)):
        pygame.draw.circle(big, (224, 216, 184), (x, y), r)
    for colour, base, height in ((HILL, 800, 90), (GROUND, 900, 40)):
        line = [(x, base - height * (math.sin(x / 310 + base) + math.sin(x / 97) / 2)) for x in range(0, 1930, 10)]
        pygame.draw.polygon(big, colour, [(0, 1080), *line, (1920, 1080)])
        for x, y in rng.sample(line, 16):
            tall = rng.uniform(0.8, 1.6) * height
            for k in range(4):                          # a fir: four triangles
                top, wide = y - tall * (1 - k * 0.22), tall * (0.10 + 0.06 * k)
                foot = top + tall * 0.42
                pygame.draw.polygon(big, colour, [(x, top), (x - wide, foot), (x + wide, foot)])
    return pygame.transform.smoothscale(big, (WIDTH, HEIGHT))


def firelight():
    """What the fire adds to the picture around it."""
    small = pygame.Surface((60, 42))
    for x in range(60):
        for y in range(42):
            near = max(0.0, 1 - math.hypot((x - 30) / 30, (y - 23) / 19)) ** 1.7
            small.set_at((x, y), [int(c * near) for c in (120, 66, 22)])
    return pygame.transform.smoothscale(small, (600, 420))


def owl(t, looks, mouth):
    """The owl at time t, looking along a direction; mouth from 0, shut, to 1."""
    big = pygame.Surface((400, 520), pygame.SRCALPHA)
    breath = 4 * math.sin(t * 2)
    pygame.draw.ellipse(big, (58, 42, 40), (60, 430, 280, 90))                              # the stump
    pygame.draw.ellipse(big, (120, 92, 72), (66, 424, 268, 60))
    pygame.draw.ellipse(big, BROWN, (90, 130 - breath, 220, 320 + breath))                  # body, belly, wings
    pygame.draw.ellipse(big, (222, 190, 148), (132, 240 - breath, 136, 200 + breath))
    for row in range(4):
        for k in range(3 + row % 2):
            x, y = 200 + (k - 1 - (row % 2) / 2) * 38, 285 + row * 34 - breath
            pygame.draw.arc(big, (170, 132, 96), (x - 16, y - 16, 32, 28), math.pi, 2 * math.pi, 4)
    for x in (74, 268):
        pygame.draw.ellipse(big, DARK, (x, 220 - breath, 58, 190))
    for x in (158, 222):
        pygame.draw.ellipse(big, GOLD, (x - 8, 432, 36, 22))                                # feet
    for side in (-1, 1):                                                                    # ears
        pygame.draw.polygon(big, DARK, [(200 + side * 96, 62 - breath), (200 + side * 104, 160 - breath),
                                        (200 + side * 30, 112 - breath)])
    pygame.draw.ellipse(big, BROWN, (88, 92 - breath, 224, 180))
    shut = max(0.0, 1 - abs((t % 3.7) - 0.1) / 0.1)                                         # a blink
    for side in (-1, 1):
        x, y = 200 + side * 52, 170 - breath
        pygame.draw.circle(big, (238, 214, 176), (x, y), 58)
        pygame.draw.circle(big, (255, 250, 236), (x, y), 44)
        pygame.draw.circle(big, GOLD, (x + 10 * looks[0], y + 10 * looks[1]), 30)
        pygame.draw.circle(big, (20, 18, 28), (x + 14 * looks[0], y + 14 * looks[1]), 18)
        pygame.draw.circle(big, (255, 255, 255), (x + 14 * looks[0] + 7, y + 14 * looks[1] - 8), 6)
        if shut:
            pygame.draw.rect(big, BROWN, (x - 50, y - 54, 100, 104 * shut), border_radius=46)
    gap = 16 * mouth
    pygame.draw.polygon(big, (196, 92, 60), [(186, 216 - breath), (214, 216 - breath), (200, 226 + gap - breath)])
    pygame.draw.polygon(big, (240, 160, 60), [(180, 206 - breath), (220, 206 - breath), (200, 232 - gap / 3 - breath)])
    return pygame.transform.smoothscale(big, (200, 260))


class Scene:
    """Everything that is on the screen. A frame is handle(), update() and draw()."""

    def __init__(self, model):
        fonts = "Segoe UI,Helvetica Neue,Ubuntu,DejaVu Sans"
        self.font, self.small = pygame.font.SysFont(fonts, 20), pygame.font.SysFont(fonts, 13)
        self.speaker, self.backdrop, self.glow = Speaker(model), backdrop(), firelight()
        rng = random.Random(2)
        stars = [(rng.randrange(WIDTH), rng.randrange(300), rng.uniform(0, 6), 1 + (k % 3 == 0)) for k in range(90)]
        self.stars = [star for star in stars if math.dist(star[:2], MOON) > 50]
        self.sparks = []                                # [x, y, speed, age]
        self.t, self.typed, self.question, self.said, self.shown = 0.0, "", "", "Hoo! Ask me something.", 0.0
        self.frames = deque(maxlen=120)                 # (seconds of work, the model's part)

    def handle(self, event):
        if event.type == pygame.TEXTINPUT:
            self.typed = (self.typed + event.text)[:70]
        elif event.type == pygame.KEYDOWN and event.key == pygame.K_BACKSPACE:
            self.typed = self.typed[:-1]
        elif event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE:
            self.speaker.stop()
            self.said = self.said[:int(self.shown)]
        elif event.type == pygame.KEYDOWN and event.key in (pygame.K_RETURN, pygame.K_KP_ENTER) and self.typed.strip():
            self.question, self.typed, self.said, self.shown = self.typed.strip(), "", "", 0.0
            self.speaker.ask(self.question)

    @property
    def talking(self):
        return self.shown < len(self.said)

    def update(self, dt):
        """Everything moves on by dt seconds; gives the seconds that the model took of it."""
        start = time.perf_counter()
        self.said += self.speaker.work()
        spent = time.perf_counter() - start
        self.t += dt
        self.shown = min(len(self.said), self.shown + dt * LETTERS_PER_S)
        if random.random() < dt * 14:
            self.sparks.append([FIRE[0] + random.uniform(-14, 14), FIRE[1] - 20, random.uniform(30, 70), 0.0])
        for spark in self.sparks:
            spark[0] += 14 * dt * math.sin(spark[1] / 17)
            spark[1] -= spark[2] * dt
            spark[3] += dt
        self.sparks = [spark for spark in self.sparks if spark[3] < 3]
        return spent

    def draw(self, screen):
        screen.blit(self.backdrop, (0, 0))
        for x, y, phase, size in self.stars:
            shine = int(130 + 90 * math.sin(self.t * 1.5 + phase))
            screen.fill((shine, shine, min(255, shine + 25)), (x, y, size, size))
        self.draw_fire(screen)
        x, y = pygame.mouse.get_pos()
        dx, dy = (x - 250, y - 295) if pygame.mouse.get_focused() else (1, 0.3)
        far = max(1.0, math.hypot(dx, dy))
        looks = (0.0, -1.0) if self.speaker.reading else (dx / far, dy / far)           # up, when it thinks
        mouth = abs(math.sin(self.t * 11)) if self.talking else 0.0
        screen.blit(owl(self.t, looks, mouth), OWL)
        self.draw_speech(screen)
        self.draw_line(screen)
        self.draw_graph(screen)

    def draw_fire(self, screen):
        flicker = 6 * math.sin(self.t * 9) + 4 * math.sin(self.t * 23)
        self.glow.set_alpha(215 + int(3 * flicker))
        screen.blit(self.glow, (FIRE[0] - 300, FIRE[1] - 230), special_flags=pygame.BLEND_RGB_ADD)
        for angle in (-0.35, 0.35):
            a = (FIRE[0] - 44 * math.cos(angle), FIRE[1] + 10 - 40 * math.sin(angle))
            b = (FIRE[0] + 44 * math.cos(angle), FIRE[1] + 10 + 40 * math.sin(angle))
            pygame.draw.line(screen, (74, 50, 40), a, b, 11)
        for colour, wide, tall in (((232, 92, 44), 30, 72), (GOLD, 20, 50), ((255, 240, 190), 10, 28)):
            tip = (FIRE[0] + flicker * wide / 30, FIRE[1] - tall - flicker)
            edge = [(FIRE[0] + wide * math.cos(u) * (1 if math.sin(u) > 0 else 0.9), FIRE[1] + 0.5 * wide * math.sin(u))
                    for u in (k * math.pi / 12 for k in range(13))]
            pygame.draw.polygon(screen, colour, [*edge, (FIRE[0] - wide * 0.7, FIRE[1] - tall * 0.45), tip,
                                                 (FIRE[0] + wide * 0.7, FIRE[1] - tall * 0.4)])
        for x, y, _, age in self.sparks:
            screen.fill([int(c * (1 - age / 3)) for c in GOLD], (x, y, 2, 2))

    def draw_speech(self, screen):
        """The bubble: the question small above, the answer as far as it was said, or dots while the owl thinks."""
        text = self.said[:int(self.shown)]
        if not text and self.speaker.busy:
            text = "." * (1 + int(self.t * 4) % 3)
        if not text:
            return
        lines = wrap(self.font, text, 430)
        wide = max(self.font.size(line)[0] for line in lines)
        if self.question:
            wide = max(wide, self.small.size(self.question)[0])
        box = pygame.Rect(372, 0, wide + 44, 28 * len(lines) + 30 + 22 * bool(self.question))
        box.centery = 250
        pygame.draw.polygon(screen, PAPER, [(340, 292), (380, 256), (380, 280)])
        pygame.draw.rect(screen, PAPER, box, border_radius=18)
        y = box.y + 14
        if self.question:
            screen.blit(self.small.render(self.question, True, FAINT), (box.x + 22, y))
            y += 22
        for k, line in enumerate(lines):
            screen.blit(self.font.render(line, True, INK), (box.x + 22, y + 28 * k))

    def draw_line(self, screen):
        box = pygame.Rect(30, HEIGHT - 62, WIDTH - 60, 42)
        glass = pygame.Surface(box.size, pygame.SRCALPHA)
        pygame.draw.rect(glass, (255, 255, 255, 26), glass.get_rect(), border_radius=21)
        pygame.draw.rect(glass, (255, 255, 255, 60), glass.get_rect(), 1, border_radius=21)
        screen.blit(glass, box)
        hint = f"Ask the owl:  {HINTS[int(self.t / 5) % len(HINTS)]}"
        text = self.font.render(self.typed or hint, True, PAPER if self.typed else FAINT)
        screen.blit(text, (box.x + 22, box.centery - text.get_height() // 2))
        if self.typed and self.t % 1 < 0.6:
            screen.fill(GOLD, (box.x + 25 + text.get_width(), box.y + 10, 2, 22))

    def draw_graph(self, screen):
        x, y = WIDTH - 150, 70
        for k, (work, part) in enumerate(self.frames):
            high, gold = (min(40, int(2400 * s)) for s in (work, part))                 # 16.7 ms: 40 pixels
            screen.fill((120, 124, 170), (x + k, y - high, 1, high))
            screen.fill(GOLD, (x + k, y - gold, 1, gold))
        screen.fill((150, 154, 190), (x, y - 40, 120, 1))
        if self.frames:
            part = 1000 * sum(part for _, part in self.frames) / len(self.frames)
            late = sum(work > 1 / FPS for work, _ in self.frames)
            label = f"model {part:.1f} ms a frame · {late} late"
            text = self.small.render(label, True, FAINT)
            screen.blit(text, (WIDTH - 30 - text.get_width(), y + 8))


def wrap(font, text, width):
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.size(longer)[0] > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=warp_embed.demo_path())
    args = parser.parse_args()
    pygame.display.init()           # not pygame.init(): a program without sound leaves the sound card alone
    pygame.font.init()
    screen = pygame.display.set_mode((WIDTH, HEIGHT), pygame.SCALED | pygame.RESIZABLE)
    pygame.display.set_caption("An owl by the fire")
    try:
        model = Model.open(args.model, context=1024)
    except (WarpError, OSError) as error:
        sys.exit(f"pygame_scene: {error}")
    with model:
        scene, clock, running = Scene(model), pygame.time.Clock(), True
        while running:
            dt, start = clock.tick(FPS) / 1000, time.perf_counter()
            for event in pygame.event.get():
                running = running and event.type != pygame.QUIT
                scene.handle(event)
            spent = scene.update(min(dt, 0.1))
            scene.draw(screen)
            scene.frames.append((time.perf_counter() - start, spent))
            pygame.display.flip()
    pygame.quit()


if __name__ == "__main__":
    main()
