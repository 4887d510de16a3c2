"""Small words around a question by language, and more questions about the model's identity and abilities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Around:
    """``before`` ends with a space if the language uses spaces; ``after`` precedes the final sign."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    identity: tuple[str, ...]
    abilities: tuple[str, ...]


AROUND: dict[str, Around] = {
    "German": Around(("Hallo, ", "Und ", "Hi, ", "Sag, ", "Guten Tag, ", "Hey, ", "Also, ", "Moin, ", "Na, "), (" denn", " eigentlich", " genau", " überhaupt", " nun", " jetzt"),
                     ("Wer bist denn du?", "Mit wem rede ich?", "Wer ist da?", "Was bist du für einer?", "Bist du ein Roboter?", "Wie darf ich dich nennen?", "Wie nennst du dich?", "Du bist wer?"),
                     ("Was kannst du alles?", "Was kannst du für mich tun?", "Was geht mit dir?", "Zeig mir, was du kannst.", "Sag mir, was du kannst.", "Was machst du?", "Wozu bist du da?", "Was weißt du?")),
    "French": Around(("Salut, ", "Et ", "Bonjour, ", "Alors, ", "Dis, ", "Coucou, ", "Bonsoir, ", "Et toi, "), (" exactement", " au juste", " alors", " donc", " vraiment"),
                     ("Toi, tu es qui ?", "Tu es quoi ?", "Avec qui je parle ?", "C'est qui ?", "Es-tu un robot ?", "Comment je peux t'appeler ?", "Vous êtes qui ?", "Quel est ce modèle ?", "C'est quel modèle ?"),
                     ("Tu sais faire quoi ?", "Montre-moi ce que tu sais faire", "Qu'est-ce que tu peux faire ?", "À quoi sers-tu ?", "Tu peux m'aider à quoi ?", "Tes capacités ?", "Que fais-tu ?")),
    "Spanish": Around(("Hola, ", "Oye, ", "Y ", "Buenas, ", "Buenos días, ", "Dime, ", "Ey, "), (" exactamente", " entonces", " en realidad", " tú"),
                      ("¿Y tú quién eres?", "¿Tú quién eres?", "¿Tu nombre?", "¿Con quién estoy hablando?", "¿Eres un robot?", "¿Cómo te puedo llamar?", "Dime tu nombre", "¿Quién está ahí?", "¿Me puedes decir quién eres?"),
                      ("¿Qué cosas sabes hacer?", "Dime qué puedes hacer", "¿Para qué sirves?", "¿Qué haces?", "¿Qué más puedes hacer?", "Muéstrame lo que sabes hacer", "¿Y qué sabes hacer?", "¿De qué eres capaz?")),
    "Italian": Around(("Ciao, ", "E ", "Buongiorno, ", "Senti, ", "Salve, ", "Allora, ", "Ehi, "), (" esattamente", " allora", " davvero", " tu"),
                      ("Tu chi sei?", "E tu chi sei?", "Chi sei tu?", "Tu come ti chiami?", "Sei un robot?", "Come ti devo chiamare?", "Con chi ho a che fare?", "Mi dici il tuo nome?", "Chi è?"),
                      ("Tu cosa sai fare?", "Fammi vedere cosa sai fare", "A cosa servi?", "Che fai?", "Cosa sei capace di fare?", "Dimmi cosa puoi fare", "Quali cose sai fare?")),
    "Portuguese": Around(("Olá, ", "Oi, ", "E ", "Bom dia, ", "Então, ", "Ei, ", "Boa noite, "), (" exatamente", " mesmo", " afinal", " então"),
                         ("Quem é você mesmo?", "E você, quem é?", "Tu és quem?", "Qual o teu nome?", "Qual é o teu nome?", "Você é um robô?", "Como posso te chamar?", "Me diga o seu nome", "Quem está aí?"),
                         ("O que sabes fazer?", "Para que serves?", "Me mostra o que você sabe fazer", "O que você faz?", "Diga o que pode fazer", "Que coisas sabes fazer?", "Você serve para quê?")),
    "Dutch": Around(("Hallo, ", "Hoi, ", "En ", "Zeg, ", "Dag, ", "Hé, ", "Goedemorgen, "), (" dan", " eigenlijk", " precies", " nou", " allemaal"),
                    ("Wie ben jij?", "Wat ben jij?", "Wie ben jij dan?", "Hoe heet jij?", "Ben je een robot?", "Hoe mag ik je noemen?", "Met wie spreek ik nu?", "Wie is daar?"),
                    ("Wat kan je?", "Wat kun jij?", "Wat kan jij?", "Wat kan jij doen?", "Wat kun je allemaal?", "Laat zien wat je kunt", "Wat doe je?", "Waar ben je goed in?", "Zeg eens wat je kan")),
    "Polish": Around(("Cześć, ", "Hej, ", "A ", "Witaj, ", "Powiedz, ", "Dobry wieczór, "), (" właściwie", " dokładnie", " teraz"),
                     ("A kim ty jesteś?", "Kim ty jesteś?", "Kto ty jesteś?", "Ty kto?", "Jesteś robotem?", "Jak mogę cię nazywać?", "Twoje imię?", "Z kim rozmawiam teraz?"),
                     ("Co ty umiesz?", "Powiedz, co potrafisz", "Do czego służysz?", "Co robisz?", "Pokaż, co umiesz", "Co potrafisz zrobić?", "Jakie rzeczy umiesz?")),
    "Swedish": Around(("Hej, ", "Och ", "Hallå, ", "Tjena, ", "God dag, ", "Men ", "Hejsan, "), (" då", " egentligen", " nu", " för något", " riktigt"),
                      ("Vem är du då?", "Vem är det?", "Vad är du för en?", "Vad heter du då?", "Är du en robot?", "Vad får jag kalla dig?", "Vem pratar jag med nu?", "Säg vad du heter"),
                      ("Vad kan du då?", "Vad gör du?", "Visa vad du kan", "Vad är du bra på?", "Säg vad du kan", "Vad klarar du?", "Vilka saker kan du?")),
    "Turkish": Around(("Merhaba, ", "Selam, ", "Peki ", "Ya ", "Günaydın, ", "Söyle, "), (" acaba", " peki", " tam olarak"),
                      ("Kimsin sen?", "Peki sen kimsin?", "Senin adın ne?", "Sen nesin?", "Robot musun?", "Sana ne diyeyim?", "Adını söyle", "Kiminle konuşuyorum şimdi?"),
                      ("Sen ne yapabilirsin?", "Ne yaparsın?", "Ne işe yararsın?", "Neler yaparsın?", "Ne yapabildiğini göster", "Yapabileceklerin neler?", "Bana ne yapabilirsin?")),
    "Russian": Around(("Привет, ", "А ", "Здравствуйте, ", "Скажи, ", "Ну, ", "Слушай, "), (" вообще", " такой", " на самом деле"),
                      ("Ты кто?", "А ты кто?", "Ты кто такой?", "Кто здесь?", "Ты робот?", "Как к тебе обращаться?", "Твоё имя?", "С кем я говорю сейчас?"),
                      ("Что умеешь делать?", "Что ты умеешь делать?", "Покажи, что ты умеешь", "Для чего ты нужен?", "Что ты делаешь?", "Что можешь?", "Скажи, что умеешь")),
    "Japanese": Around(("こんにちは、", "ねえ、", "はじめまして、", "では、", "えっと、"), (),
                       ("あなたは誰ですか？", "君の名前は？", "どちら様ですか?", "誰と話していますか?", "ロボットですか?", "何と呼べばいいですか?", "名前を教えてください"),
                       ("あなたは何ができますか?", "何が得意ですか?", "あなたにできることは何ですか?", "何をしてくれますか?", "どんなことができますか?", "何ができるか教えて")),
    "Chinese": Around(("你好，", "请问", "那", "嗨，", "您好，", "那么"), ("呢", "啊", "呀"),
                      ("你到底是谁?", "我在和谁说话?", "你是机器人吗?", "我该怎么称呼你?", "怎么称呼?", "你叫什么?", "你是哪个模型?"),
                      ("你会做什么?", "你都会什么?", "你可以做什么?", "你能干什么?", "告诉我你会什么", "你有哪些功能?", "你擅长什么?")),
    "Korean": Around(("안녕, ", "안녕하세요, ", "그럼 ", "저기, ", "반가워, "), (),
                     ("넌 누구야?", "너 누구야?", "너는 누구니?", "넌 누구니?", "너 이름이 뭐야?", "로봇이에요?", "뭐라고 부르면 돼요?", "이름을 알려 주세요"),
                     ("너는 뭘 할 수 있니?", "너는 무엇을 할 수 있니?", "뭐 할 줄 알아?", "뭐 할 수 있어요?", "할 수 있는 것을 알려 줘", "너는 뭐 해?", "무슨 일을 할 수 있어?")),
}  # fmt: skip
