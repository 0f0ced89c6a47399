"""Natural texts in many scripts, made from sentence templates with a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """Sentence templates with {who}, {what} and {where}, and the `space` that joins sentences."""

    templates: tuple[str, ...]
    who: tuple[str, ...]
    what: tuple[str, ...]
    where: tuple[str, ...]
    space: str = " "

    def sentence(self, draw: random.Random) -> str:
        return draw.choice(self.templates).format(
            who=draw.choice(self.who), what=draw.choice(self.what), where=draw.choice(self.where)
        )

    def text(self, draw: random.Random, sentences: int) -> str:
        return self.space.join(self.sentence(draw) for _ in range(sentences))


LANGUAGES: dict[str, Language] = {
    "english": Language(
        (
            "{who} found {what} {where}.",
            "Why did {who} leave {what} {where}?",
            "In 2019, {who} paid $1,250.75 for {what} {where}!",
            "“It's only {what},” said {who}, {where}.",
        ),
        ("the old engineer", "my neighbour's dog", "Dr. O'Neill", "a committee of nine", "nobody"),
        ("a leaking valve", "three state-of-the-art turbines", "an e-mail (unsent)", "the missing key"),
        ("under the bridge", "near the reservoir", "on Tuesday at 7:45 a.m.", "at http://example.org/x?y=1"),
    ),
    "german": Language(
        ("{who} hat {what} {where} gefunden.", "Warum liegt {what} {where}, fragte {who}?"),
        ("die Müllerin", "Herr Groß", "unser größter Kunde", "das Mädchen"),
        ("eine Donaudampfschifffahrtsgesellschaft", "zwei süße Äpfel", "den Schlüssel"),
        ("über der Brücke", "in Österreich", "am Fluß"),
    ),
    "french": Language(
        ("{who} a trouvé {what} {where}.", "Où {who} a-t-il laissé {what} ? {where}, peut-être…"),
        ("l'élève", "Zoé", "le maître d'œuvre", "un garçon naïf"),
        ("une clé rouillée", "l'été", "ça et là des cœurs"),
        ("près du barrage", "à l'hôtel", "au-delà de la forêt"),
    ),
    "spanish": Language(
        ("¿Dónde dejó {who} {what}? ¡{where}!", "{who} encontró {what} {where}."),
        ("el niño", "la señora Muñoz", "mi hermano"),
        ("un pingüino", "la llave", "dos camiones"),
        ("en la montaña", "bajo el puente", "en el corazón de Bogotá"),
    ),
    "turkish": Language(
        ("{who} {where} {what} buldu.", "{what} neden {where}?"),
        ("İstanbul'daki öğrenci", "yaşlı balıkçı", "Işıl"),
        ("bir anahtar", "üç şişe su", "eski ağ"),
        ("köprünün altında", "göl kıyısında", "dağda"),
    ),
    "vietnamese": Language(
        ("{who} đã tìm thấy {what} {where}.", "Tại sao {what} lại ở {where}?"),
        ("người thợ già", "cô giáo", "anh Nguyễn"),
        ("một chiếc chìa khóa", "ba quyển sách", "dòng nước"),
        ("dưới cầu", "gần hồ", "trên núi"),
    ),
    "russian": Language(
        ("{who} нашёл {what} {where}.", "Почему {what} лежит {where}?"),
        ("старый инженер", "мой сосед", "щенок", "Ёжик"),
        ("ключ от шлюза", "три турбины", "объявление"),
        ("под мостом", "у водохранилища", "в понедельник"),
    ),
    "ukrainian": Language(
        ("{who} знайшов {what} {where}.", "Чому {what} {where}?"),
        ("їжак", "моя сусідка", "Ґенадій"),
        ("ключ", "п'ять яблук", "європейський лист"),
        ("під мостом", "біля річки", "в Києві"),
    ),
    "greek": Language(
        ("{who} βρήκε {what} {where}.", "Γιατί {what} είναι {where};"),
        ("ο γέρος μηχανικός", "η ΟΔΥΣΣΕΑΣ", "το παιδί"),
        ("το κλειδί", "τρεις στρόβιλους", "ένα γράμμα"),
        ("κάτω από τη γέφυρα", "δίπλα στη λίμνη", "τη Δευτέρα"),
    ),
    "chinese": Language(
        ("{who}在{where}找到了{what}。", "为什么{what}在{where}？", "{who}說：「{what}就在{where}。」"),
        ("老工程师", "我的邻居", "小明"),
        ("一把钥匙", "三台水轮机", "重要的文件"),
        ("桥下", "水库旁边", "北京"),
        space="",
    ),
    "japanese": Language(
        ("{who}は{where}で{what}を見つけました。", "なぜ{what}が{where}にあるの？"),
        ("古い技術者", "わたしの犬", "ミナコさん"),
        ("かぎ", "三つのタービン", "コンピューター"),
        ("橋の下", "ダムの近く", "東京タワー"),
        space="",
    ),
    "korean": Language(
        ("{who}가 {where}에서 {what}를 찾았다.", "왜 {what}가 {where}에 있습니까?"),
        ("늙은 기술자", "우리 강아지", "민수"),
        ("열쇠", "터빈 세 대", "오래된 편지"),
        ("다리 아래", "저수지 근처", "서울"),
    ),
    "arabic": Language(
        ("وجد {who} {what} {where}.", "لماذا {what} {where}؟"),
        ("المهندس العجوز", "جاري", "الطِّفْلُ"),
        ("المفتاح", "ثلاثة توربينات", "رسالة قديمة"),
        ("تحت الجسر", "قرب السدّ", "يوم الإثنين"),
    ),
    "hebrew": Language(
        ("{who} מצא את {what} {where}.", "למה {what} {where}?"),
        ("המהנדס הזקן", "השכן שלי", "יֶלֶד"),
        ("המפתח", "שלוש טורבינות", "מכתב ישן"),
        ("מתחת לגשר", "ליד המאגר", "ביום שני"),
    ),
    "hindi": Language(
        ("{who} को {where} {what} मिला।", "{what} {where} क्यों है?"),
        ("बूढ़े इंजीनियर", "मेरे पड़ोसी", "लड़की"),
        ("चाबी", "तीन टरबाइन", "पुराना पत्र"),
        ("पुल के नीचे", "बाँध के पास", "सोमवार को"),
    ),
    "thai": Language(
        ("{who}พบ{what}{where}", "ทำไม{what}อยู่{where}"),
        ("วิศวกรชรา", "เพื่อนบ้านของฉัน", "เด็กน้อย"),
        ("กุญแจ", "กังหันสามตัว", "จดหมายเก่า"),
        ("ใต้สะพาน", "ใกล้เขื่อน", "วันจันทร์"),
    ),
    "emoji": Language(
        ("{who} {what} {where}", "{who}{what}!!! {where}", "lol {what} {where} {who} omg"),
        ("👩‍🔬", "🐕‍🦺", "🧑🏽‍🚒", "🇫🇷"),
        ("🔑", "💧💧💧", "❤️‍🔥", "☃️"),
        ("🌉", "🏞️", "👍🏿"),
    ),
    "code": Language(
        (
            "def {who}({what}): return {where}",
            "if ({who} != {what}) {{ {where}; }}",
            "# TODO {who}: {what} -> {where}",
        ),
        ("find_key", "__init__", "PenstockError"),
        ("x: int = 0x1F", "'a\\tb'", "list[str]"),
        ("x**2 + 1e-5", "self._line[-1]", "path/to/file.py"),
    ),
}

ODD = [
    "",
    " ",
    "\n\t ",
    "a",
    "Z",
    "7",
    "?",
    "é",
    "ж",
    "的",
    "ก",
    "א",
    "🙂",
    "\u200b",
    "\ufeffbyte order mark",
    "e\u0301 and é",
    "ﬁ ligature ½ ①",
    "ＦＵＬＬ width",
    "[CLS] [SEP] [MASK] [PAD] [UNK]",
    "<s> </s> <mask>",  # not <pad>, because the reference RoBERTa gives it no position
    "\x00null\x07bell",
    "tab\tand\nnew\r\nline",
    "a" * 150,
    "ab" * 500,
    "!" * 300,
    "0123456789" * 40,
    "word " * 700,
    "𝕸𝖆𝖙𝖍 𝒶𝓁𝓅𝒽𝒶 𐍈",
    "Z̷̢͝a̴l̵g̶o̸",
    "\U0010ffff",
]


def natural_texts(count: int = 520, seed: int = 0) -> list[str]:
    """`count` texts: every language in several lengths, mixed languages, odd texts and long ones."""
    draw = random.Random(seed)
    languages = list(LANGUAGES.values())
    texts = list(ODD)
    texts += [_long(language, draw, 10_000) for language in draw.sample(languages, 5)]
    while len(texts) < count:
        kind = len(texts) % 8
        if kind == 7:  # a text in several scripts
            texts.append(" ".join(draw.choice(languages).sentence(draw) for _ in range(draw.randint(2, 3))))
        else:
            language = languages[len(texts) % len(languages)]
            texts.append(language.text(draw, draw.choice([1, 1, 1, 1, 1, 2, 2, 4])))
    return texts


def _long(language: Language, draw: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += language.sentence(draw) + language.space
    return text[:characters]
