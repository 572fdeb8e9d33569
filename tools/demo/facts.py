"""The facts of the demo corpus: plain tables, every one of them checkable.

Countries are the 193 members of the United Nations, the Vatican City and Palestine. Where a country has several
capitals or seats of government, the table holds the one usually listed first.
"""
from __future__ import annotations

_CAPITALS = """
Afghanistan=Kabul|Albania=Tirana|Algeria=Algiers|Andorra=Andorra la Vella|Angola=Luanda
Antigua and Barbuda=Saint John's|Argentina=Buenos Aires|Armenia=Yerevan|Australia=Canberra|Austria=Vienna
Azerbaijan=Baku|the Bahamas=Nassau|Bahrain=Manama|Bangladesh=Dhaka|Barbados=Bridgetown|Belarus=Minsk
Belgium=Brussels|Belize=Belmopan|Benin=Porto-Novo|Bhutan=Thimphu|Bolivia=Sucre
Bosnia and Herzegovina=Sarajevo|Botswana=Gaborone|Brazil=Brasília|Brunei=Bandar Seri Begawan|Bulgaria=Sofia
Burkina Faso=Ouagadougou|Burundi=Gitega|Cambodia=Phnom Penh|Cameroon=Yaoundé|Canada=Ottawa|Cape Verde=Praia
the Central African Republic=Bangui|Chad=N'Djamena|Chile=Santiago|China=Beijing|Colombia=Bogotá
the Comoros=Moroni|Costa Rica=San José|Croatia=Zagreb|Cuba=Havana|Cyprus=Nicosia|the Czech Republic=Prague
the Democratic Republic of the Congo=Kinshasa|Denmark=Copenhagen|Djibouti=Djibouti|Dominica=Roseau
the Dominican Republic=Santo Domingo|East Timor=Dili|Ecuador=Quito|Egypt=Cairo|El Salvador=San Salvador
Equatorial Guinea=Malabo|Eritrea=Asmara|Estonia=Tallinn|Eswatini=Mbabane|Ethiopia=Addis Ababa|Fiji=Suva
Finland=Helsinki|France=Paris|Gabon=Libreville|the Gambia=Banjul|Georgia=Tbilisi|Germany=Berlin|Ghana=Accra
Greece=Athens|Grenada=Saint George's|Guatemala=Guatemala City|Guinea=Conakry|Guinea-Bissau=Bissau
Guyana=Georgetown|Haiti=Port-au-Prince|Honduras=Tegucigalpa|Hungary=Budapest|Iceland=Reykjavik
India=New Delhi|Indonesia=Jakarta|Iran=Tehran|Iraq=Baghdad|Ireland=Dublin|Israel=Jerusalem|Italy=Rome
the Ivory Coast=Yamoussoukro|Jamaica=Kingston|Japan=Tokyo|Jordan=Amman|Kazakhstan=Astana|Kenya=Nairobi
Kiribati=Tarawa|Kuwait=Kuwait City|Kyrgyzstan=Bishkek|Laos=Vientiane|Latvia=Riga|Lebanon=Beirut
Lesotho=Maseru|Liberia=Monrovia|Libya=Tripoli|Liechtenstein=Vaduz|Lithuania=Vilnius|Luxembourg=Luxembourg
Madagascar=Antananarivo|Malawi=Lilongwe|Malaysia=Kuala Lumpur|the Maldives=Malé|Mali=Bamako|Malta=Valletta
the Marshall Islands=Majuro|Mauritania=Nouakchott|Mauritius=Port Louis|Mexico=Mexico City
Micronesia=Palikir|Moldova=Chișinău|Monaco=Monaco|Mongolia=Ulaanbaatar|Montenegro=Podgorica|Morocco=Rabat
Mozambique=Maputo|Myanmar=Naypyidaw|Namibia=Windhoek|Nauru=Yaren|Nepal=Kathmandu
the Netherlands=Amsterdam|New Zealand=Wellington|Nicaragua=Managua|Niger=Niamey|Nigeria=Abuja
North Korea=Pyongyang|North Macedonia=Skopje|Norway=Oslo|Oman=Muscat|Pakistan=Islamabad|Palau=Ngerulmud
Palestine=Ramallah|Panama=Panama City|Papua New Guinea=Port Moresby|Paraguay=Asunción|Peru=Lima
the Philippines=Manila|Poland=Warsaw|Portugal=Lisbon|Qatar=Doha|the Republic of the Congo=Brazzaville
Romania=Bucharest|Russia=Moscow|Rwanda=Kigali|Saint Kitts and Nevis=Basseterre|Saint Lucia=Castries
Saint Vincent and the Grenadines=Kingstown|Samoa=Apia|San Marino=San Marino|São Tomé and Príncipe=São Tomé
Saudi Arabia=Riyadh|Senegal=Dakar|Serbia=Belgrade|the Seychelles=Victoria|Sierra Leone=Freetown
Singapore=Singapore|Slovakia=Bratislava|Slovenia=Ljubljana|the Solomon Islands=Honiara|Somalia=Mogadishu
South Africa=Pretoria|South Korea=Seoul|South Sudan=Juba|Spain=Madrid|Sri Lanka=Colombo|Sudan=Khartoum
Suriname=Paramaribo|Sweden=Stockholm|Switzerland=Bern|Syria=Damascus|Tajikistan=Dushanbe|Tanzania=Dodoma
Thailand=Bangkok|Togo=Lomé|Tonga=Nuku'alofa|Trinidad and Tobago=Port of Spain|Tunisia=Tunis|Turkey=Ankara
Turkmenistan=Ashgabat|Tuvalu=Funafuti|Uganda=Kampala|Ukraine=Kyiv|the United Arab Emirates=Abu Dhabi
the United Kingdom=London|the United States=Washington|Uruguay=Montevideo|Uzbekistan=Tashkent|Vanuatu=Port Vila
the Vatican City=Vatican City|Venezuela=Caracas|Vietnam=Hanoi|Yemen=Sana'a|Zambia=Lusaka|Zimbabwe=Harare
"""


def _pairs(text: str) -> list[tuple[str, str]]:
    items = text.replace("\n", "|").split("|")
    return [tuple(i.split("=")) for i in items if i]  # type: ignore[misc]


CAPITALS = _pairs(_CAPITALS)

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

OPPOSITES = _pairs(
    "hot=cold|big=small|up=down|fast=slow|old=young|good=bad|happy=sad|day=night|left=right|open=closed|full=empty"
    "|high=low|long=short|light=dark|black=white|hard=soft|wet=dry|early=late|strong=weak|rich=poor|thick=thin"
    "|clean=dirty|loud=quiet|inside=outside|first=last|true=false|yes=no|in=out|on=off|love=hate|war=peace"
    "|win=lose|push=pull|give=take|buy=sell|start=stop|north=south|east=west|deep=shallow"
    "|wide=narrow|near=far|sharp=blunt|sweet=sour|smooth=rough|awake=asleep|alive=dead|brave=cowardly"
    "|easy=difficult|cheap=expensive|safe=dangerous|above=below|before=after|always=never|laugh=cry|arrive=leave"
    "|remember=forget|friend=enemy|question=answer|summer=winter|same=different|many=few|front=back")

PLURALS = _pairs(
    "mouse=mice|child=children|foot=feet|tooth=teeth|goose=geese|man=men|woman=women|ox=oxen|person=people|leaf=leaves"
    "|knife=knives|wolf=wolves|life=lives|wife=wives|half=halves|shelf=shelves|loaf=loaves|thief=thieves|calf=calves"
    "|cat=cats|dog=dogs|house=houses|tree=trees|book=books|car=cars|box=boxes|fox=foxes|bus=buses|glass=glasses"
    "|dish=dishes|brush=brushes|watch=watches|church=churches|city=cities|baby=babies|story=stories|lady=ladies"
    "|berry=berries|fly=flies|country=countries|toy=toys|key=keys|day=days|potato=potatoes|tomato=tomatoes|hero=heroes"
    "|photo=photos|piano=pianos|sheep=sheep|fish=fish|deer=deer|cactus=cacti|crisis=crises|bird=birds|apple=apples"
    "|table=tables|flower=flowers|river=rivers|window=windows|star=stars")

PASTS = _pairs(
    "go=went|eat=ate|see=saw|come=came|take=took|give=gave|make=made|run=ran|write=wrote|speak=spoke|drink=drank"
    "|sing=sang|swim=swam|begin=began|know=knew|grow=grew|throw=threw|fly=flew|draw=drew|drive=drove|ride=rode"
    "|rise=rose|break=broke|choose=chose|freeze=froze|steal=stole|wake=woke|wear=wore|tear=tore|forget=forgot"
    "|find=found|think=thought|bring=brought|buy=bought|catch=caught|teach=taught|fight=fought|sleep=slept|keep=kept"
    "|feel=felt|leave=left|lose=lost|send=sent|build=built|spend=spent|sit=sat|win=won|hold=held|stand=stood|tell=told"
    "|sell=sold|say=said|pay=paid|hear=heard|read=read|cut=cut|put=put|walk=walked|play=played|work=worked|look=looked"
    "|jump=jumped|open=opened|help=helped|call=called|love=loved|move=moved|stop=stopped|try=tried|cry=cried")

SOUNDS = _pairs(
    "dog=woof|cat=meow|cow=moo|sheep=baa|pig=oink|duck=quack|horse=neigh|lion=roar|bee=buzz|snake=hiss|owl=hoot"
    "|frog=croak|crow=caw|mouse=squeak|rooster=cock-a-doodle-doo|donkey=hee-haw|wolf=howl|dove=coo|chick=cheep"
    "|turkey=gobble|goose=honk|bear=growl|sparrow=chirp|hen=cluck")

YOUNG = _pairs(
    "dog=puppy|cat=kitten|cow=calf|sheep=lamb|horse=foal|pig=piglet|goat=kid|hen=chick|duck=duckling|goose=gosling"
    "|lion=cub|deer=fawn|frog=tadpole|swan=cygnet|owl=owlet|hare=leveret|kangaroo=joey|eagle=eaglet|bear=cub|seal=pup"
    "|butterfly=caterpillar|eel=elver|wolf=pup|rabbit=bunny")

# thing as it is asked about, thing with its verb, colour
COLOURS = [
    ("the sky", "The sky is", "blue"), ("grass", "Grass is", "green"), ("snow", "Snow is", "white"),
    ("a banana", "A banana is", "yellow"), ("a lemon", "A lemon is", "yellow"), ("blood", "Blood is", "red"),
    ("a tomato", "A tomato is", "red"), ("a strawberry", "A strawberry is", "red"), ("coal", "Coal is", "black"),
    ("milk", "Milk is", "white"), ("chocolate", "Chocolate is", "brown"), ("a carrot", "A carrot is", "orange"),
    ("a flamingo", "A flamingo is", "pink"), ("an elephant", "An elephant is", "grey"),
    ("a crow", "A crow is", "black"),
    ("a swan", "A swan is", "white"), ("a frog", "A frog is", "green"), ("a cucumber", "A cucumber is", "green"),
    ("an aubergine", "An aubergine is", "purple"), ("lavender", "Lavender is", "purple"), ("salt", "Salt is", "white"),
    ("the sun", "The sun is", "yellow"), ("the sea", "The sea is", "blue"), ("a cherry", "A cherry is", "red"),
    ("a pumpkin", "A pumpkin is", "orange"), ("a pig", "A pig is", "pink"), ("a lobster", "A lobster is", "red"),
    ("ash", "Ash is", "grey"), ("a polar bear", "A polar bear is", "white"), ("spinach", "Spinach is", "green"),
    ("a ruby", "A ruby is", "red"), ("an emerald", "An emerald is", "green"), ("a sapphire", "A sapphire is", "blue"),
    ("rice", "Rice is", "white"), ("coffee", "Coffee is", "brown"), ("a goldfish", "A goldfish is", "orange")]

ELEMENTS = _pairs(
    "hydrogen=H|helium=He|lithium=Li|carbon=C|nitrogen=N|oxygen=O|fluorine=F|neon=Ne|sodium=Na|magnesium=Mg"
    "|aluminium=Al|silicon=Si|phosphorus=P|sulphur=S|chlorine=Cl|argon=Ar|potassium=K|calcium=Ca|titanium=Ti"
    "|chromium=Cr|manganese=Mn|iron=Fe|cobalt=Co|nickel=Ni|copper=Cu|zinc=Zn|silver=Ag|tin=Sn|iodine=I|barium=Ba"
    "|tungsten=W|platinum=Pt|gold=Au|mercury=Hg|lead=Pb|uranium=U|radium=Ra|bromine=Br|krypton=Kr|xenon=Xe")

# many small units, one large unit, how many of them
UNITS = [
    ("centimetres", "metre", 100), ("millimetres", "centimetre", 10), ("metres", "kilometre", 1000),
    ("grams", "kilogram", 1000), ("kilograms", "tonne", 1000), ("millilitres", "litre", 1000),
    ("seconds", "minute", 60), ("minutes", "hour", 60), ("hours", "day", 24), ("days", "week", 7),
    ("months", "year", 12), ("years", "century", 100), ("inches", "foot", 12), ("feet", "yard", 3),
    ("pence", "pound", 100), ("cents", "dollar", 100), ("eggs", "dozen", 12)]
UNIT_PLURALS = {"foot": "feet", "century": "centuries", "dozen": "dozen"}

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor
Wendy Xavier Yara Zoe Alice Bob Charlie Daniel Ella Frank George Hannah Ivan Julia Kevin Laura Martin Nina Oscar Peter
Quentin Robert Sarah Thomas Ursula Vera Walter Ada Alan Amy Andrew Angela Arthur Barbara Brian Carl Carol Chris Diana
Donald Edith Elena Eric Esther Eva Fatima Fiona Fred Gina Greta Hans Harry Helen Hugo Ian Ines Isaac Jacob Jane Jenny
John Jonas Joseph Karen Karl Kim Lena Lily Linda Louis Lucas Lucy Luis Mark Mary Max Mia Michael Mike Mohammed Nadia
Nancy Nick Nora Omar Oliver Otto Pablo Patricia Philip Rachel Ralph Rita Ruth Sandra Simon Sofia Sonia Stella Steve
Susan Tara Tim Tom Tony Uma Vincent Viola William Yuki Yusuf Aisha Akira Chen Deepa Hiro Igor Jin Kofi Lars Mei Olga
Priya Raj Ravi Sven Tariq Wei Yan Zara""".split()
FAVOURITES = "red blue green yellow orange purple pink black white brown grey gold silver turquoise".split()
PETS = "dog cat rabbit hamster parrot goldfish horse turtle snake lizard pony goat duck mouse donkey".split()


def number_word(n: int) -> str:
    """English word of ``n``, 0 to 100."""
    small = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
             "seventeen eighteen nineteen").split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    if n == 100:
        return "one hundred"
    if n < 20:
        return small[n]
    return tens[n // 10 - 2] + (f"-{small[n % 10]}" if n % 10 else "")
